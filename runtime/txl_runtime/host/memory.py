"""The memory of a loop on the CPU, as the programs of an update rule keep it: arrays to bind, and where rows stand.

Both forms show the rows of a sequence oldest first. What they differ in is what a step moves: rolled memory is written
anew by every step, from one set of arrays into the other; a ring stays where it is and takes the segment's rows in
place. Arrays are of the programs' type, float32 or float16; rows come out as float32. How far each sequence has come
is kept apart, in `Counters`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeAlias

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.streaming.memory import Counters, Initial, Tensors, ring_rows
from txl_runtime.types import Array, Arrays, Floats, Indices


class RolledMemory(Tensors):
    """Two sets of arrays that a program reads and writes in turn; filled rows stand last."""

    def __init__(self, manifest: Manifest, initial: Initial, counters: Counters) -> None:
        self._states = manifest.states_of("rolled")
        self._initial, self._counters, self._batch = initial, counters, manifest.batch_size
        self.sides = tuple({s.name: np.zeros(s.shape, np.dtype(s.dtype)) for s in self._states} for _ in range(2))
        self._axes = {s.name: s.row_axis for s in self._states if s.row_axis is not None}

    def bound(self, side: int, rows: int | None = None) -> tuple[Arrays, Arrays]:
        """Arrays of the first sequences, or all, to bind as inputs and outputs; only rolled memory has sides."""
        now, after = self.sides[side], self.sides[1 - side]
        inputs = {state.input: now[state.name][:rows] for state in self._states}
        return inputs, {state.output: after[state.name][:rows] for state in self._states}

    def newest(self, row: int, count: int, names: Collection[str] | None = None) -> dict[str, Floats]:
        side = int(self._counters.sides[row])
        slots = {name: self._slots(name, side)[row] for name in (self._axes if names is None else names)}
        return {name: np.array(rows[len(rows) - count :], np.float32, order="C") for name, rows in slots.items()}

    def place(self, row: int, rows: Mapping[str, Floats]) -> None:
        for name, values in rows.items():
            slots = self._slots(name, int(self._counters.sides[row]))[row]
            slots[len(slots) - len(values) :] = values

    def clear(self, rows: Indices) -> None:
        """Make sequences what they are before anything was seen; every slot is written."""
        for name in self._axes:
            for side in range(2):
                self._slots(name, side)[rows] = self._initial[name]

    def reorder(self, rows: Indices) -> None:
        sides, side = self._counters.sides, self._counters.side
        kept = {name: array[rows] for name, array in self.sides[side].items()}
        for place in np.flatnonzero(sides[rows] != side).tolist():
            for name, array in kept.items():
                array[place] = self.sides[1 - side][name][rows[place]]
        sides[:] = side
        self.clear(np.arange(self._batch))
        for name, array in kept.items():
            self.sides[side][name][: len(rows)] = array

    def _slots(self, name: str, side: int) -> Array:
        """A view [B, M, ...] of one tensor."""
        return np.moveaxis(self.sides[side][name], self._axes[name], 1)


class RingMemory(Tensors):
    """One array for all tensors, each bound as input and as output of a program that writes rows in place.

    Where a step ends beyond the ring, the rows it spilled go to the front: at most L rows, once per lap.
    """

    def __init__(self, manifest: Manifest, initial: Initial, counters: Counters) -> None:
        self._states = manifest.states_of("ring")
        self._initial, self._counters, self._batch = initial, counters, manifest.batch_size
        first = self._states[0]
        assert first.slots is not None
        self._ring = first.slots
        # All tensors have one shape [B, H, C, d_head]: rows of all of them move in one copy.
        self.all: Array = np.zeros((len(self._states), *first.shape), np.dtype(first.dtype))
        self.tensors = {state.name: self.all[i] for i, state in enumerate(self._states)}

    def bound(self, side: int, rows: int | None = None) -> tuple[Arrays, Arrays]:
        """See `RolledMemory`."""
        tensors = {name: tensor[:rows] for name, tensor in self.tensors.items()}
        inputs = {state.input: tensors[state.name] for state in self._states}
        return inputs, {state.output: tensors[state.name] for state in self._states}

    def move_to_front(self, row: int, count: int) -> None:
        rows = self.all[:, row]  # [tensors, H, C, d_head]
        rows[:, :, :count] = rows[:, :, self._ring : self._ring + count]

    def newest(self, row: int, count: int, names: Collection[str] | None = None) -> dict[str, Floats]:
        slots = ring_rows(int(self._counters.head[row]), count, self._ring)
        return {
            name: np.ascontiguousarray(self.tensors[name][row][:, slots].swapaxes(0, 1), np.float32)
            for name in (self.tensors if names is None else names)
        }

    def place(self, row: int, rows: Mapping[str, Floats]) -> None:
        for name, values in rows.items():
            slots = ring_rows(int(self._counters.head[row]), len(values), self._ring)
            self.tensors[name][row][:, slots] = values.swapaxes(0, 1)

    def clear(self, rows: Indices) -> None:
        for name, tensor in self.tensors.items():
            start = self._initial[name]  # [H, d_head], or one zero
            tensor[rows] = start[:, None] if start.ndim else start

    def reorder(self, rows: Indices) -> None:
        kept = self.all[:, rows]
        self.clear(np.arange(self._batch))
        self.all[:, : len(rows)] = kept


Memory: TypeAlias = RolledMemory | RingMemory


def open_memory(update: str, manifest: Manifest, initial: Initial, counters: Counters) -> Memory:
    """Fresh memory of an update rule; a bundle without any (M = 0) is rolled."""
    return RingMemory(manifest, initial, counters) if update == "ring" else RolledMemory(manifest, initial, counters)
