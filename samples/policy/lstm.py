"""A recurrent policy: two layers of LSTM. Its states are h and c, [layers, B, width] each."""

from __future__ import annotations

from maze import SEEN
from policy import Policy
from torch import Tensor, nn
from txl_export import InputSpec, StateSpec, StepSpec

LAYERS, WIDTH = 2, 128


class LstmPolicy(Policy):
    """A policy that takes any number of observations of each sequence, and the states h and c."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.lstm = nn.LSTM(SEEN, WIDTH, LAYERS)

    def forward(self, observation: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run observations [B, L, 9]; return scores of actions [B, L, 3], values [B, L], and the new h and c."""
        rows, (h, c) = self.lstm(self.normal(observation).transpose(0, 1), (h, c))
        return *self.heads(rows.transpose(0, 1)), h, c


def build(weights: str | None) -> StepSpec:
    """Return the model with names and shapes of inputs, states and outputs; `txl-deploy export` calls this function."""
    policy = LstmPolicy()
    if weights:
        policy.read(weights)
    states = [StateSpec(name, (LAYERS, "B", WIDTH)) for name in "hc"]
    return StepSpec(policy, [InputSpec("observation", ("B", "L", SEEN))], states, ["action", "value"])
