"""A model of the user's own, and two that are wrong, as a file for `txl-deploy export FILE.py:FUNCTION`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from txl_export import InputSpec, StateSpec, StepSpec, read_weights


class Cell(nn.Module):
    """A right one."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, h: Tensor) -> Any:
        after = self.cell(x, h)
        return self.head(after), after


def spec(module: nn.Module) -> StepSpec:
    return StepSpec(module, [InputSpec("x", ("B", 4))], [StateSpec("h", ("B", 8))], ["y"])


def good(weights: str | None) -> StepSpec:
    module = Cell()
    if weights is not None:
        module.load_state_dict(read_weights(weights))
    return spec(module)


def wrong_type(weights: str | None) -> Any:
    return good(weights).module


def raises(weights: str | None) -> StepSpec:
    class Raising(Cell):
        def forward(self, x: Tensor, h: Tensor) -> Any:
            raise KeyError("no such thing")

    return spec(Raising())
