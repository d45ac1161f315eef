"""Reads sb3-contrib's policies: the RecurrentActorCriticPolicy of RecurrentPPO."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from txl_runtime.errors import UsageError

from txl_export.adapters.policies.shape import Recurrence, Shape
from txl_export.families.own_module.spec import InputSpec, Named, OutputSpec

KEYS = ("observation_shape", "limits", "policy_kwargs")


def build(config: Mapping[str, Any]) -> Any:
    """Return a policy whose observations are a Box of `observation_shape`, its actions a Box between two `limits`.

    `policy_kwargs` are the training's. Their `activation_fn` may be the text of a class, such as "<class
    'torch.nn.modules.activation.Tanh'>".
    """
    spaces, policies = import_module("gymnasium.spaces"), import_module("sb3_contrib.common.recurrent.policies")
    arguments = dict(config["policy_kwargs"])
    if match := re.fullmatch(r"<class 'torch\.nn\.modules\.activation\.(\w+)'>", str(arguments.get("activation_fn"))):
        arguments["activation_fn"] = getattr(torch.nn, match[1])
    if unknown := [f"{key} {value}" for key, value in arguments.items() if isinstance(value, str)]:
        raise UsageError(f"policy_kwargs have {', '.join(unknown)}, expected sizes; give the policy from Python")
    low, high = (np.asarray(limit, np.float32) for limit in config["limits"])
    seen = spaces.Box(-np.inf, np.inf, tuple(config["observation_shape"]), np.float32)
    return policies.RecurrentActorCriticPolicy(seen, spaces.Box(low, high), lambda _: 0.0, **arguments)


def shape(module: Any, config: Mapping[str, Any]) -> Shape | None:
    """Return the `Shape` of a policy with `lstm_actor`; None for any other module.

    The config's `vec_normalize`, a `VecNormalize`, becomes part of the graph. If actions are a Box, `action` is clipped
    or scaled to the Box's limits, as `predict` does.
    """
    if not hasattr(module, "lstm_actor"):
        return None
    rnns = {"actor": "lstm_actor"} | ({"critic": "lstm_critic"} if module.lstm_critic is not None else {})
    many = hasattr(module.observation_space, "spaces")
    spaces = module.observation_space.spaces if many else {"obs": module.observation_space}
    normal, box = _normaliser(config.get("vec_normalize")), _box(module.action_space)

    def play(policy: Any, inputs: Named, recur: Recurrence) -> tuple[Tensor, Tensor]:
        seen = {name: normal(inputs[name]) for name in spaces}
        features = policy.extract_features(seen if many else seen["obs"])
        dtype = policy.action_net.weight.dtype
        actor, critic = (rows.to(dtype) for rows in (features if isinstance(features, tuple) else (features,) * 2))
        actor = recur("actor", actor)
        valued = recur("critic", critic) if "critic" in rnns else policy.critic(critic) if policy.critic else actor
        mean = policy.action_net(policy.mlp_extractor.forward_actor(actor))
        if box is not None:
            low, high = box
            mean = low + 0.5 * (torch.tanh(mean) + 1) * (high - low) if policy.squash_output else mean.clamp(low, high)
        return mean, policy.value_net(policy.mlp_extractor.forward_critic(valued))[:, 0]

    return Shape(
        rnns=rnns,
        inputs=[_input(name, space) for name, space in spaces.items()],
        outputs=[OutputSpec("action"), OutputSpec("value")],
        play=play,
        starts=True,
    )


def _input(name: str, space: Any) -> InputSpec:
    """Return the input of one observation: numbers for a Box, ids 0 … n-1 for a Discrete."""
    if hasattr(space, "low"):
        return InputSpec(name, ("B", *space.shape))
    if isinstance(getattr(space, "n", None), (int, np.integer)) and not space.shape:
        return InputSpec(name, ("B",), tokens=int(space.n))
    raise UsageError(f"observation {name} is a {type(space).__name__}, expected a Box or Discrete; write a StepSpec")


def _box(space: Any) -> tuple[Tensor, Tensor] | None:
    """Return the lowest and highest actions of a Box; None for a space without limits."""
    if not hasattr(space, "low") or not np.isfinite([space.low, space.high]).any():
        return None
    return torch.from_numpy(space.low), torch.from_numpy(space.high)


def _normaliser(env: Any) -> Any:
    """Return the function that a VecNormalize applies to observations; without one, a function that changes nothing."""
    if env is None or not env.norm_obs:
        return lambda rows: rows
    if isinstance(env.obs_rms, dict):
        raise UsageError("vec_normalize normalises a dictionary of observations, expected one Box; write a StepSpec")
    mean = torch.tensor(env.obs_rms.mean, dtype=torch.float32)
    deviation = torch.tensor(np.sqrt(env.obs_rms.var + env.epsilon), dtype=torch.float32)
    return lambda rows: torch.clamp((rows - mean) / deviation, -env.clip_obs, env.clip_obs)
