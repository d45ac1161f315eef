"""Written by a user of block-recurrent-transformer-pytorch; `weights` holds the arguments and a state dict."""

from __future__ import annotations

from typing import Any

from block_recurrent_transformer_pytorch import BlockRecurrentTransformer
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec, read_weights


def step(model: Any, inputs: dict[str, Any], states: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The package takes and returns a list of keys and values and a list of state vectors."""
    rows, vectors = [[name for name in states if name.startswith(kind)] for kind in ("xl.", "recurrent.")]
    given = [states[name] for name in rows], [states[name] for name in vectors]
    logits, kept, written = model(
        inputs["tokens"], xl_memories=given[0], states=given[1], return_memories_and_states=True
    )
    return {"logits": logits}, dict(zip([*rows, *vectors], [*kept, *written], strict=True))


def build(weights: str) -> StepSpec:
    """The step."""
    stored = read_weights(weights)
    config = stored["config"] | {"recurrent_layers": tuple(stored["config"]["recurrent_layers"])}
    model = BlockRecurrentTransformer(**config)
    model.load_state_dict(stored["model"])
    rows = config["block_width"] * 3 // 2 if config.get("use_compressed_mem") else config["block_width"]
    shape = (2, "B", rows, config["dim_head"])
    states = [StateSpec(f"xl.{layer:02d}.kv", shape, grows=2) for layer in range(config["depth"])]
    for number, layer in enumerate(sorted(config["recurrent_layers"])):
        start = f"layers.{layer - 1}.0.state_container.init_state"
        vectors = ("B", config["num_state_vectors"], config["dim"])
        states.append(StateSpec(f"recurrent.{number:02d}.state", vectors, initial=start))
    tokens = InputSpec("tokens", ("B", "L"), tokens=config["num_tokens"])
    return StepSpec(model, [tokens], states, [OutputSpec("logits", role="logits")], step=step)
