"""Makes the step of a policy of rsl_rl, rl_games, sb3-contrib's RecurrentPPO or skrl, or of a plain policy.

Output `action` is the action without noise (a mean, or one score per action); `value` is the critic's result. States
are `h` and `c`; if the critic has its own LSTM or GRU, `actor.h`, `critic.h` and so on. The step normalises
observations as training does. The input `episode_start` resets the states of sequences for which it is not 0. The
config's `episode_start_input` says if the step has this input; by default the step has it if the package has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from txl_runtime.errors import CheckpointError, UsageError

from txl_export.adapters.policies import plain, rl_games, rsl_rl, sb3, skrl
from txl_export.adapters.policies.shape import Recurrence, state_specs
from txl_export.adapters.registry import unwrapped
from txl_export.families.own_module.sizes import random_inputs
from txl_export.families.own_module.spec import InputSpec, Named, StepSpec

START, STARTS = "episode_start", "episode_start_input"


def build(config: Mapping[str, Any]) -> Any:
    """Return a policy without weights, of the package to which the config's keys belong."""
    config = rl_games.unfolded(config)
    nearest: Any = max((plain, rl_games, rsl_rl, sb3, skrl), key=lambda package: len(set(package.KEYS) & set(config)))
    missing = [key for key in nearest.KEYS if key not in config]
    if not missing:
        return nearest.build(config)
    lacks = f", lacks {', '.join(missing)}" if len(missing) < len(nearest.KEYS) else ""
    keys = ", or ".join(" ".join(package.KEYS) for package in (rsl_rl, rl_games, sb3, skrl, plain))
    raise UsageError(
        f"the config has {', '.join(config) or 'no keys'}{lacks}, expected {keys}; of any other policy: "
        'build the policy as your training did and call txl_export.adapt("recurrent-policy", policy); of sb3-contrib '
        'it is RecurrentPPO.load("model.zip").policy'
    )


def split(stored: Any, config: Mapping[str, Any] | None) -> tuple[Mapping[str, Any], None]:
    """Return a checkpoint's state dict, and None because it holds no config.

    Checkpoints of rsl_rl have one state dict per model; the state dicts of the config's models are merged.
    """
    if not isinstance(stored, Mapping) or not stored:
        raise CheckpointError("there is no state dict; save policy.state_dict(), or give the training's checkpoint")
    return rsl_rl.state_dict(unwrapped(stored), config or {}), None


def step_spec(module: Any, config: Mapping[str, Any] | None = None) -> StepSpec:
    """Return the step of a policy: one position of each sequence, and any number for the plain policy."""
    config = config or {}
    module = _policy(module)
    shapes = (package.shape(module, config) for package in (rl_games, sb3, rsl_rl, skrl, plain))
    shape = next((one for one in shapes if one is not None), None)
    if shape is None:
        raise UsageError(
            f"a {type(module).__name__} is no recurrent policy known here: rsl_rl's (with memory_a, or obs_normalizer, "
            "rnn and mlp), rl_games' (with a2c_network), sb3-contrib's (with lstm_actor), skrl's or a plain one; write "
            "a StepSpec for it"
        )
    starts = config.get(STARTS, shape.starts)

    def step(policy: Any, inputs: Named, states: Named) -> tuple[Named, Named]:
        if starts:
            begins = inputs[START][:, None] != 0
            states = {name: torch.where(begins, torch.zeros_like(held), held) for name, held in states.items()}
        recurrence = Recurrence(policy, shape.rnns, states)
        outputs = shape.play(policy, inputs, recurrence)
        return dict(zip((entry.name for entry in shape.outputs), outputs, strict=True)), recurrence.states

    inputs = [*shape.inputs, *([InputSpec(START, ("B",))] if starts else [])]
    spec = StepSpec(module, inputs, state_specs(module, shape.rnns), shape.outputs, step=step)
    return replace(spec, samples=_episodes(spec)) if starts and not spec.has_length else spec


def _episodes(spec: StepSpec) -> dict[str, Any]:
    """Return samples of which one in 64 begins an episode.

    With random numbers every step would clear the states.
    """
    drawn = random_inputs(spec, 64, 1, np.random.default_rng(0))
    return {name: tensor.numpy() for name, tensor in drawn.items()} | {START: np.eye(1, 64, dtype=np.float32)[0]}


def _policy(source: Any) -> Any:
    """Return the policy of an algorithm, or of a runner's algorithm; return any other object unchanged."""
    algorithm = getattr(source, "alg", source)
    if algorithm is not source and not isinstance(getattr(source, "obs_normalizer", nn.Identity()), nn.Identity):
        raise UsageError(
            "the runner itself normalises observations, unknown to its policy; set policy.actor_obs_normalizer "
            'to runner.obs_normalizer and call txl_export.adapt("recurrent-policy", policy)'
        )
    names = ("policy", "actor_critic", "actor", "student") if not isinstance(algorithm, nn.Module) else ()
    return next((policy for name in names if isinstance(policy := getattr(algorithm, name, None), nn.Module)), source)
