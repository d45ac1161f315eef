"""Models of the user's own that are each wrong in one way, as files for `txl-deploy export FILE.py:FUNCTION`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from txl_export import InputSpec, StateSpec, StepSpec, read_weights


class Cell(nn.Module):
    """A right one; the others change its last line."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 8), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(1, 8))

    def forward(self, x: Tensor, h: Tensor) -> Any:
        return self.returns(x, h, self.cell(x, h))

    def returns(self, x: Tensor, h: Tensor, after: Tensor) -> Any:
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


def _with(returns: Any) -> Any:
    class Changed(Cell):
        pass

    Changed.returns = returns
    return lambda weights: spec(Changed())


def _in_place(self: Cell, x: Tensor, h: Tensor, after: Tensor) -> Any:
    h.copy_(after)
    return self.head(after), h


def _keeps(self: Cell, x: Tensor, h: Tensor, after: Tensor) -> Any:
    self.seen = self.seen + x.mean()
    return self.head(after + self.seen), after


def _decides(self: Cell, x: Tensor, h: Tensor, after: Tensor) -> Any:
    return (self.head(after), after) if after.sum() > 0 else (self.head(-after), after)


def _raises(self: Cell, x: Tensor, h: Tensor, after: Tensor) -> Any:
    raise KeyError("no such thing")


def _unknown(self: Cell, x: Tensor, h: Tensor, after: Tensor) -> Any:
    return torch.linalg.eigvals(after[:, :3, None] * after[:, None, :3]).real, after


other_shape = _with(lambda self, x, h, after: (self.head(after), after[:, :4]))
other_dtype = _with(lambda self, x, h, after: (self.head(after), after.double()))
missing_output = _with(lambda self, x, h, after: after)
extra_output = _with(lambda self, x, h, after: (self.head(after), after, after))
dropout = _with(lambda self, x, h, after: (nn.functional.dropout(self.head(after), 0.5, True), after))
aliased = _with(lambda self, x, h, after: (after[:, :3], after))
in_place, keeps, decides, raises, unknown = map(_with, (_in_place, _keeps, _decides, _raises, _unknown))


class Sized(Cell):
    """Takes segments of six alone."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(6, 4))

    def forward(self, x: Tensor, h: Tensor) -> Any:
        after = self.cell((x + self.places).mean(1), h)
        return self.head(after), after


def sized(weights: str | None) -> StepSpec:
    return StepSpec(Sized(), [InputSpec("x", ("B", "L", 4))], [StateSpec("h", ("B", 8))], ["y"])
