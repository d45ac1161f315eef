"""Written by a user of feedback-transformer-pytorch; `weights` holds the constructor's arguments and a state dict."""

from __future__ import annotations

from typing import Any

from feedback_transformer_pytorch import FeedbackTransformer
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec, read_weights


def step(model: Any, inputs: dict[str, Any], states: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """No memory is None for the package, which then leaves attention out where it takes one token at a time."""
    memory = None if states["keys"] is None else (states["keys"], states["values"])
    logits, (keys, values) = model(inputs["tokens"], memory=memory, return_memory=True)
    return {"logits": logits}, {"keys": keys, "values": values}


def build(weights: str) -> StepSpec:
    """The step."""
    stored = read_weights(weights)
    config = stored["config"]
    model = FeedbackTransformer(**config)
    model.load_state_dict(stored["model"])
    shape = ("B", config["mem_len"], config["heads"] * config["dim_head"])
    start = None if config["seq_len"] == 1 else 0.0
    states = [StateSpec(name, shape, initial=start, grows=1) for name in ("keys", "values")]
    tokens = InputSpec("tokens", ("B", "L"), tokens=config["num_tokens"])
    return StepSpec(model, [tokens], states, [OutputSpec("logits", role="logits")], step=step)
