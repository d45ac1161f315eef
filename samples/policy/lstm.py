"""A recurrent policy: two layers of LSTM. Its state is h and c of all layers, with the batch second."""

from __future__ import annotations

from maze import SEEN
from policy import Policy
from torch import Tensor, nn
from txl_export import InputSpec, StateSpec, StepSpec

LAYERS, WIDTH = 2, 128


class LstmPolicy(Policy):
    """Takes any number of observations of each sequence and the states, returns scores, values and the states."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.lstm = nn.LSTM(SEEN, WIDTH, LAYERS)

    def forward(self, observation: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[B, L, 9] and two states [layers, B, width] → [B, L, 3], [B, L] and two states."""
        rows, (h, c) = self.lstm(self.normal(observation).transpose(0, 1), (h, c))
        return *self.heads(rows.transpose(0, 1)), h, c


def build(weights: str | None) -> StepSpec:
    """Return the step with names and shapes; `txl-deploy export` calls this."""
    policy = LstmPolicy()
    if weights:
        policy.read(weights)
    states = [StateSpec(name, (LAYERS, "B", WIDTH)) for name in "hc"]
    return StepSpec(policy, [InputSpec("observation", ("B", "L", SEEN))], states, ["action", "value"])
