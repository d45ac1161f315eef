"""The states of a loop on the CPU: arrays that programs are bound to, one class for each placement.

"replace" and "rolled" states have two sides, 0 and 1: every step reads the arrays of one side and writes the arrays of
the opposite side. A ring is one array, into which a step writes the segment's rows in place. `SequenceCounters` has the
fill and side of each sequence. Arrays have the programs' types; memory rows are returned as float32.

To add a placement, write classes here and in `device/placements.py`, add them to `PLACEMENTS`, and add the update rule
to `bundle/tables.py` and `bundle/agreement.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import ClassVar

import numpy as np

from txl_runtime.bundle.tables import Program, StateTensor
from txl_runtime.host.engine import Engine
from txl_runtime.streaming.programs import Shapes
from txl_runtime.streaming.state import Initial, Placement, SequenceCounters, placed_alike, ring_rows, start_of
from txl_runtime.types import Array, Arrays, Call, Indices


class HostPlacement(Placement):
    """A placement with the additional methods that the loop on the CPU calls.

    Args:
        initial: first values of the states, from `initial_values`.

    Attributes:
        shapes: the states' shapes on each side, if they decide which program runs; else ((), ()).
    """

    shapes: Sequence[Shapes] = ((), ())
    grows: ClassVar[bool] = False
    """True if a step may change the shapes of the states."""

    def __init__(self, states: Sequence[StateTensor], initial: Initial, counters: SequenceCounters) -> None:
        self._states, self._counters, self._batch = states, counters, len(counters.valid)
        self._starts = {s.name: start_of(s, initial[s.name].astype(np.dtype(s.dtype))) for s in states}

    def bound(self, program: Program, side: int) -> tuple[Arrays, Arrays]:
        """Return (state inputs, state outputs) of a program by name, e.g. [B, M, D], for sequences on `side`.

        With B 4, M 16 and D 32, an array of memory rows is [4, 16, 32].
        """
        raise NotImplementedError

    def kept(self, outputs: Collection[str], side: int) -> Iterable[tuple[Array, Array]]:
        """Return (old, new) arrays, [B, ..., 1] each, of the states with these outputs, for sequences on `side`."""
        return ()

    def call(self, engine: Engine, program: Program, side: int, taken: Arrays, returned: Arrays) -> Call:
        """Return a function that runs a program whose states may change their shapes. The arrays of its inputs and
        outputs besides states are `taken` and `returned`.

        For example, `taken` has {"ids": [4, 1]}, and `returned` {"logprobs": [4, 1, 256]}.
        """
        raise NotImplementedError

    def join(self, row: int, side: int) -> None:
        """Copy a sequence's states to `side` from the opposite side; do nothing if the placement has only one side."""
        return


class Replaced(HostPlacement):
    """States in two sets of arrays, the sides: each step reads one side and writes the opposite side, in turns.

    A state without an axis of sequences is shared: it is reset only if all sequences are cleared or a state is put.

    Attributes:
        sides: the arrays on each side by state name; absent states are missing.
    """

    def __init__(self, states: Sequence[StateTensor], initial: Initial, counters: SequenceCounters) -> None:
        super().__init__(states, initial, counters)
        self.sides = [self._fresh(side) for side in range(2)]

    def bound(self, program: Program, side: int) -> tuple[Arrays, Arrays]:
        inputs = {state.input: array for state, array in self._there(side)}
        return inputs, {state.output: array for state, array in self._there(1 - side)}

    def kept(self, outputs: Collection[str], side: int) -> Iterable[tuple[Array, Array]]:
        for state, array in self._there(side):
            if state.output in outputs and state.batch_axis is not None:
                pair = (np.moveaxis(one, state.batch_axis, 0) for one in (array, self.sides[1 - side][state.name]))
                # add an axis, because an index into [B] would give a scalar
                before, after = (one[..., None] for one in pair)
                yield before, after

    def join(self, row: int, side: int) -> None:
        # Shared tensors do not occur here: `agreement` allows them no open batch size.
        for state, array in self._there(1 - side):
            self.sides[side][state.name][state.axes.at(row)] = state.axes.one(array, row)

    def take(self, row: int, fill: int, names: Collection[str] | None) -> dict[str, Array]:
        there = ((s, array) for s, array in self._there(self._side(row)) if names is None or s.name in names)
        return {state.name: np.array(state.axes.one(array, row)) for state, array in there}

    def put(self, row: int, tensors: Arrays) -> None:
        for state, array in self._there(self._side(row)):
            array[state.axes.at(row)] = tensors[state.name]

    def clear(self, rows: Indices) -> None:
        every = len(np.unique(rows)) == self._batch
        for side in range(2):  # clear both sides, so that nothing of the old sequence remains
            for state, array in self._there(side):
                if every or state.batch_axis is not None:
                    array[state.axes.at(rows)] = self._start(state, array)

    def reorder(self, rows: Indices, side: int) -> None:
        moved = self._counters.sides[rows] != side
        for state, array in self._there(side):
            if state.batch_axis is not None:
                selected = array[state.axes.at(rows)]
                if moved.any():
                    selected[state.axes.at(moved)] = self.sides[1 - side][state.name][state.axes.at(rows[moved])]
                array[state.axes.at(slice(len(rows)))] = selected
                array[state.axes.at(slice(len(rows), None))] = self._start(state, array)

    def written(self, side: int) -> Iterable[tuple[StateTensor, Array]]:
        return self._there(side)

    def _side(self, row: int) -> int:
        return int(self._counters.sides[row])

    def _there(self, side: int) -> Iterator[tuple[StateTensor, Array]]:
        """Return the states that exist on a side, with their arrays."""
        return ((state, self.sides[side][state.name]) for state in self._states if state.name in self.sides[side])

    def _fresh(self, side: int) -> dict[str, Array]:
        """Return new arrays for a side, in the states' first shapes."""
        return {state.name: np.zeros(state.shape, np.dtype(state.dtype)) for state in self._states}

    def _start(self, state: StateTensor, array: Array) -> Array:
        """Return the first value of a state, which broadcasts to the state's array."""
        return self._starts[state.name]


class Rolled(Replaced):
    """Memory rows in two sets of arrays: a step reads one set and writes the other.

    The newest row is last: of M = 4 rows with 2 filled, rows 2 and 3 hold data.
    """

    def take(self, row: int, fill: int, names: Collection[str] | None) -> dict[str, Array]:
        return {
            name: np.array(slots[len(slots) - fill :], np.float32, order="C")
            for name, slots in self._slots(row)
            if names is None or name in names
        }

    def put(self, row: int, tensors: Arrays) -> None:
        for name, slots in self._slots(row):
            slots[len(slots) - len(tensors[name]) :] = tensors[name]

    def written(self, side: int) -> Iterable[tuple[StateTensor, Array]]:
        return ()

    def _slots(self, row: int) -> Iterator[tuple[str, Array]]:
        """Return (name, view [M, ...]) for each memory tensor of one sequence."""
        return ((state.name, state.axes.rows(array)[row]) for state, array in self._there(self._side(row)))


class Ring(HostPlacement):
    """Rings of all states in one array. Each state is both input and output of a program, which writes rows in place.

    If a step writes rows behind the last slot, they are copied to the first slots: at most L rows, once per turn.

    Attributes:
        all: array of all states, [tensors, B, H, C, d_head] with C = slots + spill, whose rows move in one copy.
        tensors: views of `all` by state name, [B, H, C, d_head].
    """

    def __init__(self, states: Sequence[StateTensor], initial: Initial, counters: SequenceCounters) -> None:
        super().__init__(states, initial, counters)
        first = states[0]
        assert first.slots is not None
        self._ring = first.slots
        self.all: Array = np.zeros((len(states), *first.shape), np.dtype(first.dtype))
        self.tensors = {state.name: self.all[i] for i, state in enumerate(states)}

    def bound(self, program: Program, side: int) -> tuple[Arrays, Arrays]:
        inputs = {state.input: self.tensors[state.name] for state in self._states}
        return inputs, {state.output: self.tensors[state.name] for state in self._states}

    def spill(self, row: int, count: int) -> None:
        rows = self.all[:, row]  # one sequence's part of all states, [tensors, H, C, d_head]
        rows[:, :, :count] = rows[:, :, self._ring : self._ring + count]

    def take(self, row: int, fill: int, names: Collection[str] | None) -> dict[str, Array]:
        slots = ring_rows(int(self._counters.head[row]), fill, self._ring)
        return {
            name: np.ascontiguousarray(tensor[row][:, slots].swapaxes(0, 1), np.float32)
            for name, tensor in self.tensors.items()
            if names is None or name in names
        }

    def put(self, row: int, tensors: Arrays) -> None:
        for name, tensor in self.tensors.items():
            values = tensors[name]
            slots = ring_rows(int(self._counters.head[row]), len(values), self._ring)
            tensor[row][:, slots] = values.swapaxes(0, 1)

    def clear(self, rows: Indices) -> None:
        for name, tensor in self.tensors.items():
            tensor[rows] = self._starts[name]

    def reorder(self, rows: Indices, side: int) -> None:
        moved = self.all[:, rows]
        self.clear(np.arange(self._batch))
        self.all[:, : len(rows)] = moved


PLACEMENTS: dict[str, type[HostPlacement]] = {"replace": Replaced, "rolled": Rolled, "ring": Ring}
"""Placement classes by update rule."""


def open_placements(
    states: Sequence[StateTensor],
    initial: Initial,
    counters: SequenceCounters,
    replaced: type[HostPlacement] = Replaced,
    ring: type[HostPlacement] = Ring,
) -> tuple[HostPlacement, ...]:
    """Return placements with states in their first values; `replaced` and `ring` are the classes for these rules."""
    known = placed_alike(states, {**PLACEMENTS, "replace": replaced, "ring": ring})
    return tuple(placement(some, initial, counters) for placement, some in known)
