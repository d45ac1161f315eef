"""The parts that both policies share: normalised observations, and heads for scores of actions and for the value."""

from __future__ import annotations

import textwrap

import torch
import txl_export
from maze import DOORS, SEEN
from torch import Tensor, nn
from txl_runtime.errors import CheckpointError

LIMIT = 5.0
"""Normalised observations are clipped to -LIMIT … LIMIT, so that a broken sensor does not derail the policy."""


class Policy(nn.Module):
    """The base of both policies. Its buffers, running mean and variance, become part of the bundle's weights."""

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        for name, value in {"mean": torch.zeros(SEEN), "variance": torch.ones(SEEN), "count": torch.zeros(())}.items():
            self.register_buffer(name, value)
        self.action, self.value = nn.Linear(width, 3), nn.Linear(width, 1)

    def read(self, file: str) -> None:
        """Load the weights that `train.py` wrote to a file."""
        try:
            self.load_state_dict(txl_export.read_weights(file))
        except RuntimeError as error:
            reason = textwrap.shorten(str(error).partition(":")[2], 160, placeholder=" …")
            raise CheckpointError(f"{file}: not the weights of this {type(self).__name__}: {reason}") from None

    def see(self, observation: Tensor) -> None:
        """Update the running mean and variance with observations [..., 9]; only training calls this."""
        rows = observation.reshape(-1, SEEN)
        share = len(rows) / (self.count + len(rows))
        apart = rows.mean(0) - self.mean
        self.variance += share * (rows.var(0, correction=0) - self.variance + (1 - share) * apart**2)
        self.mean += share * apart
        self.count += len(rows)

    def normal(self, observation: Tensor) -> Tensor:
        """Return (x - mean) / deviation, clipped, e.g. 2 for x = 5, mean 1 and deviation 2."""
        return ((observation - self.mean) / (self.variance + 1e-5).sqrt()).clamp(-LIMIT, LIMIT)

    def heads(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores of actions [B, L, 3] and values [B, L]: the predicted number of doors still to come."""
        return self.action(features), self.value(features)[..., 0] * DOORS
