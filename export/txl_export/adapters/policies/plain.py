"""Builds a plain recurrent policy: a normaliser, an LSTM or GRU, an actor of two layers and a critic of one layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from txl_runtime.errors import UsageError

from txl_export.adapters.policies.shape import Recurrence, Shape, count
from txl_export.families.own_module.spec import InputSpec, Named, OutputSpec

KEYS = ("obs", "hidden", "layers", "actions", "kind")
KINDS = ("LSTM", "GRU")
EPSILON = 0.01
"""Number that is added to the standard deviation before observations are divided by it, as in rsl_rl's normaliser."""


class PlainPolicy(nn.Module):
    """The layers of a policy, under the names that packages use; the adapter calls the layers."""

    def __init__(self, obs: int, hidden: int, layers: int, actions: int, kind: str) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(obs))
        self.register_buffer("std", torch.ones(obs))
        self.rnn = getattr(nn, kind)(obs, hidden, layers)
        self.actions = actions
        self.actor = nn.Sequential(nn.Linear(hidden, hidden), nn.ELU(), nn.Linear(hidden, actions))
        self.critic = nn.Linear(hidden, 1)


def build(config: Mapping[str, Any]) -> PlainPolicy:
    """Return a policy of the config's sizes and kind, "LSTM" or "GRU"."""
    if config["kind"] not in KINDS:
        raise UsageError(f"kind is {config['kind']!r}, expected one of {', '.join(KINDS)}")
    return PlainPolicy(**{key: count(key, config[key]) for key in KEYS[:-1]}, kind=config["kind"])


def shape(module: Any, config: Mapping[str, Any]) -> Shape | None:
    """Return the `Shape` of a module from `build`; None for any other module. The first axis of inputs is time."""
    if not isinstance(module, PlainPolicy):
        return None
    rows = ("L", "B")
    outputs = [OutputSpec("action", (*rows, module.actions)), OutputSpec("value", rows)]
    return Shape({"rnn": "rnn"}, [InputSpec("obs", (*rows, module.rnn.input_size))], outputs, _play)


def _play(policy: Any, inputs: Named, recur: Recurrence) -> tuple[Tensor, Tensor]:
    rows = recur("rnn", (inputs["obs"] - policy.mean) / (policy.std + EPSILON))
    return policy.actor(rows), policy.critic(rows)[..., 0]
