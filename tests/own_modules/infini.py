"""Written by a user of infini-transformer-pytorch; `weights` holds the constructor's arguments and a state dict."""

from __future__ import annotations

from typing import Any

from infini_transformer_pytorch import InfiniTransformer
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec, read_weights


def step(model: Any, inputs: dict[str, Any], states: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A pair for each layer: the sum of keys times values, and the sum of keys. No memory is None, and is not zeros."""
    held = list(states.values())
    past = None if held[0] is None else list(zip(held[::2], held[1::2], strict=True))
    logits, _, memories = model(inputs["tokens"], past_memories=past, return_new_memories=True)
    return {"logits": logits}, dict(zip(states, [part for pair in memories for part in pair], strict=True))


def build(weights: str) -> StepSpec:
    """The step."""
    stored = read_weights(weights)
    config = stored["config"]
    model = InfiniTransformer(**config)
    model.load_state_dict(stored["model"])
    heads, width, states = config["heads"], config["dim_head"], []
    for layer in range(config["depth"]):
        states.append(StateSpec(f"layers.{layer:02d}.kv", ("B", heads, width, width), initial=None))
        states.append(StateSpec(f"layers.{layer:02d}.norm", ("B", heads, width), initial=None))
    tokens = InputSpec("tokens", ("B", "L"), tokens=config["num_tokens"])
    return StepSpec(model, [tokens], states, [OutputSpec("logits", role="logits")], step=step)
