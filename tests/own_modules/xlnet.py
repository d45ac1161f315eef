"""XLNet of transformers, read from left to right, with the memory that its own `mems` are.

txl-deploy export tests/own_modules/xlnet.py:build --weights xlnet.pt -o xlnet.txl

The file of weights holds {"config": …, "model": …}. Where the model begins it has no memory; each step appends and
keeps the newest `mem_len` rows, so that sequences run in lockstep. `xlnet_counted.py` is the same with a counter.
"""

from __future__ import annotations

from typing import Any

from transformers import XLNetConfig, XLNetLMHeadModel
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec, read_weights


def step(model: Any, inputs: dict[str, Any], states: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """One segment; a memory of 0 rows is none to the model."""
    found = model(inputs["tokens"], mems=list(states.values()), use_mems=True, return_dict=True)
    return {"logits": found.logits}, dict(zip(states, found.mems, strict=True))


def spec(model: Any) -> StepSpec:
    """Return the step with its inputs, states and outputs."""
    config = model.config
    shape = (config.mem_len, "B", config.d_model)
    return StepSpec(
        model,
        [InputSpec("tokens", ("B", "L"), tokens=config.vocab_size)],
        [StateSpec(f"layers.{layer:02d}.mem", shape, grows=0) for layer in range(config.n_layer)],
        [OutputSpec("logits", role="logits")],
        step=step,
    )


def build(weights: str) -> StepSpec:
    """The model of a checkpoint."""
    stored = read_weights(weights)
    model = XLNetLMHeadModel(XLNetConfig(**stored["config"]))
    model.load_state_dict(stored["model"])
    return spec(model)
