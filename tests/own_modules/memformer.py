"""Written by a user of memformer: its encoder, whose memory slots are the state, and its decoder over the same tokens.

`weights` holds the constructor's arguments and a state dict.
"""

from __future__ import annotations

from typing import Any

from memformer import Memformer
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec, read_weights


def step(model: Any, inputs: dict[str, Any], states: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The package's decoder alone gives logits; its own call gives a loss."""
    encoded, slots, *_ = model(inputs["source"], mems=states["slots"])
    outputs = {"encoded": encoded}
    if model.decoder is not None:
        outputs["logits"] = model.decoder.net(inputs["target"], context=encoded)
    return outputs, {"slots": slots}


def build(weights: str) -> StepSpec:
    """The step."""
    stored = read_weights(weights)
    config = stored["config"]
    model = Memformer(**config)
    model.load_state_dict(stored["model"])
    inputs = [InputSpec("source", ("B", "L"), tokens=config["enc_num_tokens"])]
    outputs = [OutputSpec("encoded")]
    if model.decoder is not None:
        inputs.append(InputSpec("target", ("B", "L"), tokens=config["dec_num_tokens"]))
        outputs.append(OutputSpec("logits", role="logits"))
    slots = StateSpec("slots", ("B", config["num_memory_slots"], config["dim"]), initial="memory_slots")
    return StepSpec(model, inputs, [slots], outputs, step=step)
