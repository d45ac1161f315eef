"""A recurrent policy: normalised observations, an LSTM, an actor and a critic. Time stands first."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec

from stand_ins.stateful.weights import Config


class Policy(nn.Module):
    """obs [L, B, n], h and c [layers, B, H] → action [L, B, a], value [L, B], h, c."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config["hidden"]
        self.register_buffer("mean", torch.zeros(config["obs"]))
        self.register_buffer("std", torch.ones(config["obs"]))
        self.rnn = nn.LSTM(config["obs"], hidden, config["layers"])
        self.actor = nn.Sequential(nn.Linear(hidden, hidden), nn.ELU(), nn.Linear(hidden, config["actions"]))
        self.critic = nn.Linear(hidden, 1)

    def forward(self, obs: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One segment."""
        normalised = (obs - self.mean) / (self.std + 0.01)  # rsl_rl's normaliser adds this
        features, (h, c) = self.rnn(normalised, (h, c))
        return self.actor(features), self.critic(features).squeeze(-1), h, c


def build(weights: Mapping[str, Tensor], config: Config) -> StepSpec:
    """The step of case rp01."""
    policy = Policy(config)
    policy.load_state_dict(dict(weights))
    shape = (config["layers"], "B", config["hidden"])
    return StepSpec(
        policy.eval(),
        [InputSpec("obs", ("L", "B", config["obs"]))],
        [StateSpec("h", shape), StateSpec("c", shape)],
        [OutputSpec("action", ("L", "B", config["actions"])), OutputSpec("value", ("L", "B"))],
    )
