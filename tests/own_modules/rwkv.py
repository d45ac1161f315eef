"""RWKV of transformers: five states, of which one starts at -1e30.

txl-deploy export tests/own_modules/rwkv.py:build --weights rwkv.pt -o rwkv.txl --segment-length 16

The package writes into the states that it is given, so they are copied first. With segments of one token it mixes the
sequences of a batch up; the export finds that and says so. With --batch-size 1, or segments of two tokens and more, it
does not.
"""

from __future__ import annotations

from typing import Any

from transformers import RwkvConfig, RwkvForCausalLM
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec, read_weights

NAMES = ("ffn_shift", "att_shift", "numerator", "denominator", "maximum")


def step(model: Any, inputs: dict[str, Any], states: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """One segment."""
    tokens = inputs["tokens"]
    copies = [states[name].clone() for name in NAMES]
    found = model(tokens, state=copies, use_cache=True, return_dict=True)
    logits = found.logits[:, -tokens.shape[1] :]  # as many positions as sequences where it mixes them up
    return {"logits": logits}, dict(zip(NAMES, found.state, strict=True))


def spec(model: Any) -> StepSpec:
    """Return the step with its inputs, states and outputs."""
    config = model.config
    shape = ("B", config.hidden_size, config.num_hidden_layers)
    return StepSpec(
        model,
        [InputSpec("tokens", ("B", "L"), tokens=config.vocab_size)],
        [StateSpec(name, shape, initial=-1e30 if name == "maximum" else 0.0) for name in NAMES],
        [OutputSpec("logits", role="logits")],
        step=step,
    )


def build(weights: str) -> StepSpec:
    """The model of a checkpoint."""
    stored = read_weights(weights)
    model = RwkvForCausalLM(RwkvConfig(**stored["config"]))
    model.load_state_dict(stored["model"])
    return spec(model)
