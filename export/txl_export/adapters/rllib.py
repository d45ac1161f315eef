"""Makes the step of RLlib's GTrXLNet, or of the model that `use_attention` builds around it.

The package's model returns only the memory rows of the current segment. The package's sampler keeps the newest
`memory_inference` rows of each unit; they start as zeros, which take part in attention. Here the step keeps these rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from txl_runtime.errors import UsageError

from txl_export.adapters.registry import usual_split
from txl_export.checkpoints.files.pickle_names import Stub
from txl_export.families.own_module.spec import InputSpec, Named, OutputSpec, StateSpec, StepSpec


def build(config: Mapping[str, Any]) -> Any:
    """Return a `GTrXLNet` of the config's arguments; with `use_attention` the model that RLlib makes of this config.

    `observation` (the size or shape of an observation) and `num_outputs` replace the environment's spaces.
    """
    from gymnasium.spaces import Box, Discrete
    from ray.rllib.models.catalog import MODEL_DEFAULTS, ModelCatalog
    from ray.rllib.models.torch.attention_net import GTrXLNet

    arguments, size = dict(config), config["observation"]
    del arguments["observation"]
    space = Box(-1.0, 1.0, (size,) if isinstance(size, int) else tuple(size))
    outputs = arguments.pop("num_outputs", None)
    actions = Discrete(outputs or 1)  # GTrXLNet ignores this space
    if arguments.get("use_attention"):
        return ModelCatalog.get_model_v2(space, actions, outputs, {**MODEL_DEFAULTS, **arguments}, framework="torch")
    longest = {**MODEL_DEFAULTS, "max_seq_len": arguments.pop("max_seq_len", MODEL_DEFAULTS["max_seq_len"])}
    return GTrXLNet(space, actions, outputs, longest, "gtrxl", **arguments)


def split(stored: Any, config: Mapping[str, Any] | None) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Return the weights, and the config that the file of a policy with `use_attention` holds, else None.

    The `policy_state.pkl` of such a policy holds the whole config. The names of the weights decide `vf_share_layers`,
    because algorithms such as PPO change that setting.
    """
    weights, _ = usual_split(stored, config)
    spec = stored.get("policy_spec") if isinstance(stored, Mapping) else None
    algorithm = _entries(_entries(spec).get("config"))
    model = _entries(algorithm.get("model"))
    settings = dict(model) if model.get("use_attention") else {}
    if not settings and not (config or {}).get("use_attention"):
        return weights, None
    settings["vf_share_layers"] = not any("_value_branch_separate" in name for name in weights)
    space = _entries(_entries(_entries(spec).get("observation_space")).get("space"))
    if space.get("space") == "box":
        settings["observation"] = space.get("shape")
    if (head := weights.get("_logits_branch._model.0.weight")) is not None:
        settings["num_outputs"] = len(head)
    return weights, settings


def _entries(value: Any) -> Mapping[str, Any]:
    """Return a dictionary, or the attributes of a pickled object (a `Stub`); {} for anything else."""
    value = value.state if isinstance(value, Stub) else value
    return value if isinstance(value, Mapping) else {}


def step_spec(module: Any, config: Mapping[str, Any] | None = None) -> StepSpec:
    """Return the step of a `GTrXLNet`, or of a model around a `GTrXLNet`.

    The outputs are `logits` and `value`, or `features` if there are no heads.
    """
    core = getattr(module, "gtrxl", module)
    lacking = [name for name in ("attention_layers", "memory_inference", "attention_dim") if not hasattr(core, name)]
    if lacking:
        raise UsageError(
            f"this {type(module).__name__} has no {', '.join(lacking)}, expected RLlib's GTrXLNet, or a model of the "
            "old API stack with use_attention; for another one give a StepSpec of your own"
        )
    if past := [name for name in ("use_n_prev_actions", "use_n_prev_rewards") if getattr(module, name, 0)]:
        raise UsageError(
            f"attention_{past[0]} is {getattr(module, past[0])}, expected 0: earlier actions and rewards are kept by "
            "RLlib's sampler, outside the model; train without, or give a StepSpec of your own"
        )
    units, rows, width = core.num_transformer_units, core.memory_inference, core.attention_dim
    states = [StateSpec(f"units.{unit:02d}.memory", ("B", rows, width)) for unit in range(units if rows else 0)]
    outputs = [OutputSpec("logits", ("B", "L", module.num_outputs)), OutputSpec("value", ("B", "L"))]
    if core is module and core.logits is None:
        outputs = [OutputSpec("features", ("B", "L", width))]
    shape = module.obs_space.shape
    return StepSpec(module, [InputSpec("obs", ("B", "L", *shape))], states, outputs, step=_step, segment_lengths=[1])


def _step(module: Any, inputs: Named, states: Named) -> tuple[Named, Named]:
    """Run one segment, whose inputs the package takes as [B·L, …]; restore attributes in which it stores features."""
    obs, core = inputs["obs"], getattr(module, "gtrxl", module)
    batch, length = obs.shape[:2]
    held = list(states.values()) or [obs.new_zeros(batch, 0, core.attention_dim)] * core.num_transformer_units
    attributes = [(part, dict(vars(part))) for part in (module, core)]
    try:
        arguments = {"obs": obs.flatten(0, 1)}
        result, rows = module(arguments, held, torch.full((batch,), length, dtype=torch.int32))
        result = result.unflatten(0, (batch, length))
        if core is module and core.logits is None:
            outputs = {"features": result}
        else:
            outputs = {"logits": result, "value": module.value_function().unflatten(0, (batch, length))}
    finally:
        for part, content in attributes:
            vars(part).update(content)
    new = [torch.cat((old, row.unflatten(0, (batch, length))), 1) for old, row in zip(held, rows, strict=True)]
    return outputs, {name: full[:, length:] for name, full in zip(states, new, strict=False)}
