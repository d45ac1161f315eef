"""rsl_rl's recurrent actor-critic as it was before version 5, by its names: memory_a, memory_c, actor, critic."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Memory(nn.Module):
    """An LSTM or GRU that keeps its state itself."""

    def __init__(self, inputs: int, width: int, layers: int, kind: str) -> None:
        super().__init__()
        self.rnn = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](inputs, width, layers)
        self.hidden_state: Tensor | tuple[Tensor, Tensor] | None = None

    def forward(self, rows: Tensor) -> Tensor:
        found, self.hidden_state = self.rnn(rows[None], self.hidden_state)
        return found[0]

    def reset(self, dones: Tensor) -> None:
        held = self.hidden_state
        for part in held if isinstance(held, tuple) else (held,):
            assert part is not None
            part[:, dones] = 0.0


class Normalizer(nn.Module):
    """(x - mean) / (std + eps)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("_mean", torch.randn(1, width))
        self.register_buffer("_std", torch.rand(1, width) + 0.5)

    def forward(self, rows: Tensor) -> Tensor:
        return (rows - self._mean) / (self._std + 0.01)


class ActorCriticRecurrent(nn.Module):
    """Separate memories; the critic sees more than the actor.

    Args:
        kind: "lstm" or "gru".
        normalized: since version 3 the policy has its normalisers; before that there are none in it.
    """

    def __init__(self, seen: int, known: int, actions: int, kind: str, normalized: bool) -> None:
        super().__init__()
        self.memory_a, self.memory_c = Memory(seen, 8, 2, kind), Memory(known, 8, 2, kind)
        self.actor = nn.Sequential(nn.Linear(8, 8), nn.ELU(), nn.Linear(8, actions))
        self.critic = nn.Sequential(nn.Linear(8, 8), nn.ELU(), nn.Linear(8, 1))
        self.std = nn.Parameter(torch.ones(actions))
        if normalized:
            self.actor_obs_normalizer, self.critic_obs_normalizer = Normalizer(seen), Normalizer(known)

    def act_inference(self, rows: Tensor) -> Tensor:
        """The mean."""
        if hasattr(self, "actor_obs_normalizer"):
            rows = self.actor_obs_normalizer(rows)
        return self.actor(self.memory_a(rows))

    def evaluate(self, rows: Tensor) -> Tensor:
        """The value, [B, 1]."""
        if hasattr(self, "critic_obs_normalizer"):
            rows = self.critic_obs_normalizer(rows)
        return self.critic(self.memory_c(rows))

    def reset(self, dones: Tensor) -> None:
        self.memory_a.reset(dones)
        self.memory_c.reset(dones)
