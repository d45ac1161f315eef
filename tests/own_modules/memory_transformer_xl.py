"""Written by a user of memory-transformer-xl; `weights` holds the constructor's arguments and a state dict."""

from __future__ import annotations

from typing import Any

from memory_transformer_xl import MemoryTransformerXL
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec, read_weights


def step(model: Any, inputs: dict[str, Any], states: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two memories: hidden rows of every layer, and the slots that all layers share."""
    logits, memory = model(inputs["tokens"], memories=(states["short"], states["long"]))
    return {"logits": logits}, {"short": memory.short, "long": memory.long}


def build(weights: str) -> StepSpec:
    """The step."""
    stored = read_weights(weights)
    config = stored["config"]
    model = MemoryTransformerXL(**config)
    model.load_state_dict(stored["model"])
    states = [
        StateSpec("short", (len(model.memory_layers), "B", config["mem_len"], config["dim"]), grows=2),
        StateSpec("long", ("B", config["lmem_len"], config["dim"]), grows=1),
    ]
    tokens = InputSpec("tokens", ("B", "L"), tokens=config["num_tokens"])
    return StepSpec(model, [tokens], states, [OutputSpec("logits", role="logits")], step=step)
