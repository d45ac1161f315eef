"""Makes the step of episodic-transformer-memory-ppo, whose memory holds a whole episode.

A step reads a window of the memory and writes one row. The repository is no package: its modules are in the folder that
the config names as `repository`, in the current folder, or on Python's path. Its training loops compute memory, mask
and the rows of the window; here the step computes them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributions import Distribution
from txl_runtime.errors import UsageError

from txl_export.families.own_module.spec import InputSpec, Named, StateSpec, StepSpec


def build(config: Mapping[str, Any]) -> Any:
    """Return a `Transformer`, or for a training's config an `ActorCriticModel`, which contains a `Transformer`.

    A training's config has the key `transformer`. It also needs facts about the environment: `observation` (a size, or
    an image's shape), `actions` (one size per branch) and `max_episode_length`.
    """
    core = _class("transformer", "Transformer", config)
    if "transformer" not in config:
        return core(config, config["input_dim"], config["max_episode_steps"])
    size, model = config["observation"], _class("model", "ActorCriticModel", config)
    space = SimpleNamespace(shape=(size,) if isinstance(size, int) else tuple(size))
    return model(config, space, tuple(config["actions"]), config["max_episode_length"])


def _class(home: str, name: str, config: Mapping[str, Any]) -> Any:
    folder = Path(config.get("repository", ".")).resolve()
    here = (folder / f"{home}.py").is_file()
    sys.path[:0] = [str(folder)] * here
    try:
        package = import_module(home)
    finally:
        del sys.path[:here]
    if not hasattr(package, name) or (here and Path(str(package.__file__)).parent != folder):
        raise UsageError(
            f"the module {home} is {package.__file__}, expected the one of episodic-transformer-memory-ppo"
        )
    return getattr(package, name)


def step_spec(module: Any, config: Mapping[str, Any] | None = None) -> StepSpec:
    """Return the step of a `Transformer` (output `features`) or an `ActorCriticModel` (`logits` and `value`)."""
    core = getattr(module, "transformer", module)
    if not hasattr(core, "transformer_blocks") or (core is not module and not hasattr(module, "policy_branches")):
        raise UsageError(
            f"this is a {type(module).__name__}, expected the repository's Transformer or ActorCriticModel"
        )
    steps, window = core.max_episode_steps, core.config["memory_length"]
    if window > steps:
        raise UsageError(f"memory_length is {window}, expected at most the {steps} steps of an episode")
    memory = StateSpec("memory", ("B", steps, core.num_blocks, core.embed_dim))
    states = [memory, StateSpec("t", ("B",), dtype="int32")]
    if core is module:
        return StepSpec(
            module, [InputSpec("obs", ("B", core.linear_embedding.in_features))], states, ["features"], _step
        )
    obs = InputSpec("obs", ("B", *module.observation_space_shape))
    return StepSpec(module, [obs], states, [*_branches(module.policy_branches), "value"], _step)


def _branches(policy: Any) -> list[str]:
    return ["logits"] if len(policy) == 1 else [f"logits.{number}" for number in range(len(policy))]


def _step(module: Any, inputs: Named, states: Named) -> tuple[Named, Named]:
    """Run one step of each sequence; after an episode's last step, write no row and leave `t` as it is."""
    core, memory, t = getattr(module, "transformer", module), states["memory"], states["t"][:, None]
    steps, window = memory.shape[1], core.config["memory_length"]
    slots = torch.arange(window)
    rows = (t.long() - (window - 1)).clamp(0, steps - window) + slots
    visible = (slots < t.clamp(max=window - 1)).to(memory.dtype)
    read = memory.gather(1, rows[:, :, None, None].expand(-1, -1, *memory.shape[2:]))
    checked = Distribution._validate_args
    try:
        # graphs cannot branch on values, as torch's checks of distributions do
        Distribution.set_default_validate_args(False)
        hidden, *value, row = module(inputs["obs"], read, visible, rows)
    finally:
        Distribution.set_default_validate_args(checked)
    memory = torch.where((torch.arange(steps) == t)[:, :, None, None], row[:, None], memory)
    after = {"memory": memory, "t": (states["t"] + 1).clamp(max=steps)}
    if core is module:
        return {"features": hidden}, after
    return {name: one.logits for name, one in zip(_branches(hidden), hidden, strict=True)} | {"value": value[0]}, after
