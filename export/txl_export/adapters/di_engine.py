"""Makes the step of DI-engine's GTrXL, or of its GTrXLDQN with encoder and heads.

The first axis of inputs is time. The memory starts as zeros, which take part in attention. The package keeps the memory
in an attribute: the step sets that attribute before a call, reads it afterwards and restores it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from txl_runtime.errors import UsageError

from txl_export.families.own_module.spec import InputSpec, Named, OutputSpec, StateSpec, StepSpec

_KEPT = ("memory", "att_mask", "pos_embedding_dict")
"""Attributes of a GTrXL that a call changes: the memory, and tables cached by segment length."""


def build(config: Mapping[str, Any]) -> Any:
    """Return a `GTrXL`, or with `obs_shape` a `GTrXLDQN`; `activation` may name a class of torch.nn, e.g. "ReLU"."""
    arguments = dict(config)
    if isinstance(arguments.get("activation"), str):
        arguments["activation"] = getattr(torch.nn, arguments["activation"])()
    if "obs_shape" in arguments:
        from ding.model.template.q_learning import GTrXLDQN

        return GTrXLDQN(**arguments)
    from ding.torch_utils.network.gtrxl import GTrXL

    return GTrXL(**arguments)


def step_spec(module: Any, config: Mapping[str, Any] | None = None) -> StepSpec:
    """Return the step of a `GTrXL` (output `features`), or of a model with a GTrXL as `core` (output `logit`)."""
    core = getattr(module, "core", module)
    lacking = [name for name in (*_KEPT, "memory_len", "layers", "embedding_dim") if not hasattr(core, name)]
    if lacking or (core is not module and not hasattr(module, "head")):
        raise UsageError(
            f"this {type(module).__name__} has no {', '.join(lacking) or 'head'}, expected ding's GTrXL or GTrXLDQN; "
            "for another model around a GTrXL give a StepSpec of your own"
        )
    shape: tuple[int, ...] = (core.embedding[0].in_features if core.use_embedding_layer else core.embedding_dim,)
    if core is not module and not core.use_embedding_layer:
        shape = tuple(module.obs_encoder.obs_shape)
    layers, most, width = len(core.layers) + 1, core.memory_len, core.embedding_dim
    states = [StateSpec("memory", (layers, most, "B", width))] if most else []
    with torch.no_grad():
        tried, _ = _step(module, {"obs": core.u.new_zeros(1, 1, *shape)}, {})
    outputs = [OutputSpec(name, ("L", "B", result.shape[-1])) for name, result in tried.items()]
    return StepSpec(module, [InputSpec("obs", ("L", "B", *shape))], states, outputs, step=_step, segment_lengths=[1])


def _step(module: Any, inputs: Named, states: Named) -> tuple[Named, Named]:
    """Run one segment. If `states` has no memory, as in the trial run of `step_spec`, the memory is zeros."""
    core, obs = getattr(module, "core", module), inputs["obs"]
    zeros = core.u.new_zeros(len(core.layers) + 1, core.memory_len, obs.shape[1], core.embedding_dim)
    attributes = {name: getattr(core, name) for name in _KEPT}
    try:
        core.att_mask, core.pos_embedding_dict = {}, {}
        core.reset_memory(state=states.get("memory", zeros))
        logits = module(obs)["logit"]
        after = {name: core.get_memory() for name in states}
    finally:
        for name, value in attributes.items():
            setattr(core, name, value)
    if core is module:
        return {"features": logits}, after
    if isinstance(logits, torch.Tensor):
        return {"logit": logits}, after
    return {f"logit.{number}": branch for number, branch in enumerate(logits)}, after
