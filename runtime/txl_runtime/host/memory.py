"""The memory of a stream as the programs of an update rule keep it: arrays to bind, and which row stands where.

Both forms hold `fill` rows per sequence and show them oldest first. What they differ in is what a step moves: rolled
memory is written anew by every step, from one set of arrays into the other; a ring stays where it is and takes the
segment's rows in place. Arrays are of the programs' type, float32 or float16; rows come out as float32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.streaming.loop import Arrays

__all__ = ["Initial", "Memory", "RingMemory", "RolledMemory", "Rows", "open_memory", "ring_rows"]

Rows = NDArray[np.float32]
Initial = Mapping[str, NDArray[np.float32]]


class Memory(Protocol):
    """State tensors of B sequences."""

    @property
    def side(self) -> int:
        """Which of its bindings comes next: programs are bound once per side."""
        ...

    def bound(self) -> tuple[Arrays, Arrays]:
        """The arrays to bind on this side, as inputs and as outputs of a program; names are the graph's."""
        ...

    def advance(self, valid: NDArray[np.int32]) -> None:
        """A step is done: of the segment's rows, `valid` [B] became memory."""
        ...

    @property
    def piecewise(self) -> bool:
        """Whether to take its tensors out one by one costs no more than all at once."""
        ...

    def newest(self, row: int, count: int, names: Collection[str] | None = None) -> dict[str, Rows]:
        """Copies of the newest rows of one sequence, oldest first, [count, ...] per tensor, of some or of all."""
        ...

    @property
    def heads(self) -> NDArray[np.int32]:
        """Where each sequence stands, [B]: rounding depends on it, so a snapshot keeps it. Zero where rows move."""
        ...

    def place(self, row: int, head: int, rows: Mapping[str, Rows]) -> None:
        """Make rows [count, ...] per tensor the newest of one cleared sequence, at a head if that means anything."""
        ...

    def clear(self, rows: NDArray[np.int64]) -> None:
        """Make sequences what they are before anything was seen; every slot is written."""
        ...

    def reorder(self, rows: NDArray[np.int64]) -> None:
        """Sequence i becomes what sequence rows[i] was; those behind the last are cleared."""
        ...


class RolledMemory:
    """Two sets of arrays that a program reads and writes in turn; filled rows stand last."""

    piecewise = True

    def __init__(self, manifest: Manifest, initial: Initial) -> None:
        self._states = manifest.states_of("rolled")
        self._initial, self._batch = initial, manifest.batch_size
        self._sides = tuple({s.name: np.zeros(s.shape, np.dtype(s.dtype)) for s in self._states} for _ in range(2))
        self._axes = {state.name: state.axis for state in self._states}
        self.side = 0

    def bound(self) -> tuple[Arrays, Arrays]:
        """See `Memory`."""
        now, after = self._sides[self.side], self._sides[1 - self.side]
        return {s.input: now[s.name] for s in self._states}, {s.output: after[s.name] for s in self._states}

    def advance(self, valid: NDArray[np.int32]) -> None:
        """See `Memory`."""
        self.side = 1 - self.side

    def newest(self, row: int, count: int, names: Collection[str] | None = None) -> dict[str, Rows]:
        """See `Memory`."""
        slots = {name: self._slots(name, self.side)[row] for name in names or self._axes}
        return {name: np.array(rows[len(rows) - count :], np.float32, order="C") for name, rows in slots.items()}

    @property
    def heads(self) -> NDArray[np.int32]:
        """See `Memory`."""
        return np.zeros(self._batch, np.int32)

    def place(self, row: int, head: int, rows: Mapping[str, Rows]) -> None:
        """See `Memory`."""
        for name, values in rows.items():
            slots = self._slots(name, self.side)[row]
            slots[len(slots) - len(values) :] = values

    def clear(self, rows: NDArray[np.int64]) -> None:
        """See `Memory`."""
        for name in self._axes:
            for side in range(2):
                self._slots(name, side)[rows] = self._initial[name]

    def reorder(self, rows: NDArray[np.int64]) -> None:
        """See `Memory`."""
        kept = {name: array[rows] for name, array in self._sides[self.side].items()}
        self.clear(np.arange(self._batch))
        for name, array in kept.items():
            self._sides[self.side][name][: len(rows)] = array

    def _slots(self, name: str, side: int) -> NDArray[Any]:
        """A view [B, M, ...] of one tensor."""
        return np.moveaxis(self._sides[side][name], self._axes[name], 1)


class RingMemory:
    """One array for all tensors, each bound as input and as output of a program that writes rows in place.

    `head` is the slot of each sequence's next row. Where a step ends beyond the ring, the rows it spilled go to the
    front: at most L rows, once per lap.
    """

    side = 0
    piecewise = True

    def __init__(self, manifest: Manifest, initial: Initial) -> None:
        self._states = manifest.states_of("ring")
        self._initial, self._batch = initial, manifest.batch_size
        first = self._states[0]
        assert first.slots is not None
        self._ring = first.slots
        # All tensors have one shape [B, H, C, d_head]: rows of all of them move in one copy.
        self._all: NDArray[Any] = np.zeros((len(self._states), *first.shape), np.dtype(first.dtype))
        self._tensors = {state.name: self._all[i] for i, state in enumerate(self._states)}
        self._head = np.zeros(self._batch, np.int32)

    def bound(self) -> tuple[Arrays, Arrays]:
        """See `Memory`."""
        tensors = {s.input: self._tensors[s.name] for s in self._states}
        inputs: dict[str, NDArray[Any]] = {"head": self._head, **tensors}
        return inputs, {s.output: self._tensors[s.name] for s in self._states}

    def advance(self, valid: NDArray[np.int32]) -> None:
        """See `Memory`."""
        head, ring = self._head, self._ring
        np.add(head, valid, out=head)
        if max(head.tolist()) < ring:  # the usual case; numpy takes several times as long over so few
            return
        for row in np.flatnonzero(head >= ring):
            spilled = int(head[row]) - ring
            rows = self._all[:, row]  # [tensors, H, C, d_head]
            rows[:, :, :spilled] = rows[:, :, ring : ring + spilled]
            head[row] = spilled

    def newest(self, row: int, count: int, names: Collection[str] | None = None) -> dict[str, Rows]:
        """See `Memory`."""
        slots = ring_rows(int(self._head[row]), count, self._ring)
        return {
            name: np.ascontiguousarray(self._tensors[name][row][:, slots].swapaxes(0, 1), np.float32)
            for name in names or self._tensors
        }

    @property
    def heads(self) -> NDArray[np.int32]:
        """See `Memory`."""
        return self._head.copy()

    def place(self, row: int, head: int, rows: Mapping[str, Rows]) -> None:
        """See `Memory`."""
        self._head[row] = head % self._ring
        for name, values in rows.items():
            slots = ring_rows(int(self._head[row]), len(values), self._ring)
            self._tensors[name][row][:, slots] = values.swapaxes(0, 1)

    def clear(self, rows: NDArray[np.int64]) -> None:
        """See `Memory`."""
        for name, tensor in self._tensors.items():
            start = self._initial[name]  # [H, d_head], or one zero
            tensor[rows] = start[:, None] if start.ndim else start
        self._head[rows] = 0

    def reorder(self, rows: NDArray[np.int64]) -> None:
        """See `Memory`."""
        kept, heads = self._all[:, rows], self._head[rows]
        self.clear(np.arange(self._batch))
        self._all[:, : len(rows)], self._head[: len(rows)] = kept, heads


def ring_rows(head: int, count: int, ring: int) -> NDArray[np.int64]:
    """The slots of the newest `count` rows of a ring whose next row goes to slot `head`, oldest first."""
    return np.arange(head - count, head) % ring


def open_memory(update: str, manifest: Manifest, initial: Initial) -> Memory:
    """Fresh memory of an update rule; a bundle without any (M = 0) is rolled."""
    return RingMemory(manifest, initial) if update == "ring" else RolledMemory(manifest, initial)
