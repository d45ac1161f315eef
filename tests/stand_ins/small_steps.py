"""Small modules with state, one for each way of keeping it, and what is said of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec


class Policy(nn.Module):
    """A recurrent policy with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True)
        self.action, self.value = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, obs: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        hidden, (h, c) = self.lstm(obs, (h, c))
        return self.action(hidden), self.value(hidden), h, c


def policy() -> StepSpec:
    torch.manual_seed(0)
    states = [StateSpec("h", (2, "B", 8)), StateSpec("c", (2, "B", 8))]
    return StepSpec(Policy(), [InputSpec("obs", ("B", "L", 6))], states, ["action", "value"])


class Cell(nn.Module):
    """A GRU cell that keeps its state itself."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 5), nn.Linear(5, 7)
        self.memory = nn.ModuleDict({"first": nn.Identity()})
        self.memory["first"].rows = [torch.zeros(1, 5)]

    def forward(self, x: Tensor) -> Tensor:
        rows: Any = self.memory["first"].rows
        rows[0] = self.cell(x, rows[0])
        return self.out(rows[0])


def cell() -> StepSpec:
    torch.manual_seed(1)
    state = StateSpec("h", ("B", 5), attribute="memory.first.rows.0", initial=0.25)
    return StepSpec(Cell(), [InputSpec("x", ("B", 4))], [state], [OutputSpec("scores", role="logits")])


class Window(nn.Module):
    """Adds the mean of the last rows, of which there are none at first."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.embed, self.out = most, nn.Embedding(11, 4), nn.Linear(4, 11)

    def forward(self, tokens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat([rows, self.embed(tokens).transpose(0, 1)])
        return self.out(self.embed(tokens) + seen.mean(0)[:, None]), seen[-self.most :]


def window(most: int = 6) -> StepSpec:
    torch.manual_seed(2)
    state = StateSpec("rows", (most, "B", 4), grows=0)
    return StepSpec(Window(most), [InputSpec("tokens", ("B", "L"), tokens=11)], [state], ["scores"])


def growing() -> StepSpec:
    """`window`, as a file's function, which would be given the weights if it took an argument."""
    return window()


class Absent(nn.Module):
    """A recurrence whose first step has nothing to remember."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.keep = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
        new = self.read(x)
        if h is not None:
            new = torch.tanh(new + self.keep(h))
        return new * 2, new


def absent() -> StepSpec:
    torch.manual_seed(3)
    return StepSpec(Absent(), [InputSpec("x", ("B", 3))], [StateSpec("h", ("B", 4), initial=None)], ["y"])


class Ahead(nn.Module):
    """Frames with two that lie ahead, a learned start and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.start = nn.Conv1d(3, 4, 3), nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, frames: Tensor, bank: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        new = self.mix(frames.transpose(1, 2)).transpose(1, 2) + bank
        return new, (bank + new.mean(1, keepdim=True)) / 2 + seen[:, None, None] * 1e-3, seen + new.shape[1]


def ahead() -> StepSpec:
    torch.manual_seed(4)
    states = [StateSpec("bank", ("B", 1, 4), initial="start"), StateSpec("seen", ("B",), dtype="int64")]
    return StepSpec(Ahead(), [InputSpec("frames", ("B", "L", 3), lookahead=2)], states, ["features"])


class Counted(nn.Module):
    """Takes `valid`: rows beyond it change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 2)

    def forward(self, x: Tensor, total: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        counts = torch.arange(x.shape[1])[None] < valid[:, None]
        sums = total[:, None] + torch.where(counts[..., None], x, torch.zeros(())).cumsum(1)
        return self.out(sums), sums[:, -1].clone()


def counted() -> StepSpec:
    torch.manual_seed(5)
    return StepSpec(Counted(), [InputSpec("x", ("B", "L", 3))], [StateSpec("total", ("B", 3))], ["y"], lengths=True)


class Chaotic(nn.Module):
    """Untrained weights that are too large: every rounding grows with every step, in `h` and what is made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out, self.beside = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(3, 2)
        self.inner.weight.data *= 8

    def forward(self, x: Tensor, h: Tensor, mean: Tensor) -> tuple[Tensor, ...]:
        h, mean = torch.tanh(self.inner(h) + x.sum(-1, keepdim=True)), 0.9 * mean + 0.1 * x
        return self.out(h), self.beside(mean), h, mean


def chaotic() -> StepSpec:
    torch.manual_seed(6)
    states = [StateSpec("h", ("B", 8)), StateSpec("mean", ("B", 3))]
    return StepSpec(Chaotic(), [InputSpec("x", ("B", 3))], states, ["y", "calm"])


EVERY = {"policy": policy, "cell": cell, "window": window, "absent": absent, "ahead": ahead, "counted": counted}
