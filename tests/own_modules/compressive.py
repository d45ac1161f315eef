"""Written by a user of compressive-transformer-pytorch; `weights` holds the arguments and a state dict."""

from __future__ import annotations

from typing import Any

from compressive_transformer_pytorch import CompressiveTransformer
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec, read_weights


def step(model: Any, inputs: dict[str, Any], states: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The third result is a loss for training."""
    logits, memory, _ = model(inputs["tokens"], memories=(states["mem"], states["compressed_mem"]))
    return {"logits": logits}, {"mem": memory.mem, "compressed_mem": memory.compressed_mem}


def build(weights: str) -> StepSpec:
    """The step."""
    stored = read_weights(weights)
    config = stored["config"]
    model = CompressiveTransformer(**config)
    model.load_state_dict(stored["model"])
    layers, width = len(model.memory_layers), config["dim"]
    states = [
        StateSpec("mem", (layers, "B", config["mem_len"], width), grows=2),
        StateSpec("compressed_mem", (layers, "B", config["cmem_len"], width), grows=2),
    ]
    tokens = InputSpec("tokens", ("B", "L"), tokens=config["num_tokens"])
    return StepSpec(model, [tokens], states, [OutputSpec("logits", role="logits")], step=step)
