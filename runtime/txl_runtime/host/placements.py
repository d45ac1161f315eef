"""The states of a loop on the CPU: arrays that programs are bound to, one class for each placement.

What is replaced and what is rolled is written anew by every step, from one set of arrays into the other: it has two
sides. A ring stays where it is and takes the segment's rows in place. How far each sequence has come, and on which side
it stands, is kept apart, in `Counters`. Arrays are of the programs' types; memory rows come out as float32.

A further placement is a class here and an entry of `PLACEMENTS`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from txl_runtime.bundle.tables import Program, StateTensor
from txl_runtime.streaming.programs import Shape, Shapes, shapes_after, start_shape
from txl_runtime.streaming.state import Counters, Initial, Placement, placed_alike, ring_rows, start_of, with_sequence
from txl_runtime.types import Array, Arrays, Indices


class HostPlacement(Placement):
    """See `streaming.state.Placement`; what the loop on the CPU asks besides.

    Args:
        states: of the bundle's table.
        initial: what they start as, from `initial_values`.
        counters: of the loop.

    Attributes:
        shaped: whether the shapes of its states decide which program runs.
    """

    shaped = False

    def __init__(self, states: Sequence[StateTensor], initial: Initial, counters: Counters) -> None:
        self._states, self._initial, self._counters = states, initial, counters
        self._batch = len(counters.valid)

    def bound(self, program: Program, side: int) -> tuple[Arrays, Arrays]:
        """Arrays of all B sequences to bind as a program's inputs and outputs, where sequences stand on this side."""
        raise NotImplementedError

    def join(self, row: int, side: int) -> None:
        """Copy a sequence to this side from the other one; what has one side is there already."""
        return


@dataclass(frozen=True)
class Side:
    """One of two sets of arrays, in the order of the states; None for a state that is absent."""

    shapes: Shapes
    arrays: tuple[Array | None, ...]


class Replaced(HostPlacement):
    """Two sets of arrays that a step reads and writes in turn.

    A state may be absent at first, and may have other rows after a step than before. So a side is a set of arrays that
    are kept for its shapes, which programs are bound to once; or what a program with open rows returned. A state
    without an axis for sequences is shared: it stays unless all sequences are cleared or one state is put.

    Attributes:
        sides: what stands on either side. The one where no sequence stands is free: a step may put a set there.
        grows: whether a state can have other shapes after a step than before.
    """

    shaped = True

    def __init__(self, states: Sequence[StateTensor], initial: Initial, counters: Counters) -> None:
        super().__init__(states, initial, counters)
        self._kept: dict[tuple[str, Shape, int], Array] = {}
        self._sets: dict[tuple[Shapes, int], Side] = {}
        self._starts = [start_of(state, initial[state.name].astype(np.dtype(state.dtype))) for state in states]
        self._fresh: Shapes = tuple(start_shape(state) for state in states)
        self.grows = any(state.absent or state.rows is not None for state in states)
        self.sides = [self._set(self._fresh, side) for side in range(2)]

    def around(self, program: Program, side: int) -> tuple[Side, Side]:
        """The sets that a program reads where sequences stand on this side, and writes; it leaves no rows open."""
        taken = {spec.name: spec.fixed for spec in program.inputs}
        before = tuple(taken.get(state.input) for state in self._states)
        return self._set(before, side), self._set(shapes_after(program, self._states), 1 - side)

    def bound(self, program: Program, side: int) -> tuple[Arrays, Arrays]:
        before, after = (zip(self._states, part.arrays, strict=True) for part in self.around(program, side))
        inputs = {state.input: array for state, array in before if array is not None}
        return inputs, {state.output: array for state, array in after if array is not None}

    def settle(self, side: int, wanted: Side) -> None:
        """Bring what stands on a side into the arrays of a set that a program reads."""
        if self.sides[side] is not wanted:
            for own, array in zip(wanted.arrays, self.sides[side].arrays, strict=True):
                if own is not None and array is not None and own is not array:  # an open program returned it
                    np.copyto(own, array)

    def inputs(self, side: int) -> dict[str, Array]:
        """What stands on a side, by the names that programs read it under."""
        arrays = zip(self._states, self.sides[side].arrays, strict=True)
        return {state.input: array for state, array in arrays if array is not None}

    def adopt(self, side: int, returned: Arrays) -> None:
        """Let what a program returned stand on a side as it is."""
        arrays = tuple(returned[state.output] for state in self._states)
        self.sides[side] = Side(tuple(array.shape for array in arrays), arrays)

    def join(self, row: int, side: int) -> None:
        here, there = self.sides[side].arrays, self.sides[1 - side].arrays
        for state, to, array in zip(self._states, here, there, strict=True):
            if to is not None and array is not None and state.batch_axis is not None:
                place = state.axes.at(row)
                to[place] = array[place]

    def take(self, row: int, fill: int, names: Collection[str] | None) -> dict[str, Array]:
        return {
            state.name: np.array(state.axes.one(array, row))
            for state, array in zip(self._states, self._of(row).arrays, strict=True)
            if array is not None and (names is None or state.name in names)
        }

    def put(self, row: int, tensors: Arrays) -> None:
        """See `Placement`. Where a tensor has another number of rows than before, other sequences have zeros there."""
        arrays = with_sequence(self._states, self._of(row).arrays, row, tensors, self._batch)
        self._hold(int(self._counters.sides[row]), arrays)

    def clear(self, rows: Indices) -> None:
        """See `Placement`. States that grow begin anew when all sequences do."""
        every, sides = len(np.unique(rows)) == self._batch, self._counters.sides[rows]
        for side in {*sides.tolist()}:
            if every:
                self.sides[side] = self._set(self._fresh, side)
            for index, state in enumerate(self._states):
                if state.batch_axis is not None:
                    self._begin(index, side, state.axes.at(rows[sides == side]))
                elif every:
                    self._begin(index, side, ...)

    def reorder(self, rows: Indices, side: int) -> None:
        moved = self._counters.sides[rows] != side
        for index, state in enumerate(self._states):
            array, axes = self.sides[side].arrays[index], state.axes
            if array is None or axes.batch is None:
                continue
            kept = array[axes.at(rows)]
            other = self.sides[1 - side].arrays[index]
            if other is not None and moved.any():
                kept[axes.at(moved)] = other[axes.at(rows[moved])]
            array[axes.at(slice(len(rows)))] = kept
            self._begin(index, side, axes.at(slice(len(rows), None)))

    def written(self, side: int) -> Iterable[tuple[StateTensor, Array]]:
        found = zip(self._states, self.sides[side].arrays, strict=True)
        return [(state, array) for state, array in found if array is not None]

    def _of(self, row: int) -> Side:
        return self.sides[int(self._counters.sides[row])]

    def _set(self, shapes: Shapes, side: int) -> Side:
        """The set of arrays that are kept for some shapes."""
        for state, shape in zip(self._states, shapes, strict=True):
            if shape is not None and (state.name, shape, side) not in self._kept:
                self._kept[state.name, shape, side] = np.zeros(shape, np.dtype(state.dtype))
        pairs = list(zip(self._states, shapes, strict=True))
        arrays = tuple(None if shape is None else self._kept[state.name, shape, side] for state, shape in pairs)
        return self._sets.setdefault((shapes, side), Side(shapes, arrays))

    def _begin(self, index: int, side: int, key: Any) -> None:
        """Let a part of a state be what it is before anything was seen; zeros where it has other rows by now."""
        array, start = self.sides[side].arrays[index], self._starts[index]
        if array is not None:
            array[key] = start if array.shape == self._fresh[index] else 0

    def _hold(self, side: int, arrays: Sequence[Array | None]) -> None:
        """Let arrays of any shapes stand on a side: they are copied to those that are kept."""
        wanted = self._set(tuple(None if array is None else array.shape for array in arrays), side)
        for own, array in zip(wanted.arrays, arrays, strict=True):
            if own is not None and array is not None and own is not array:
                np.copyto(own, array)
        self.sides[side] = wanted


class Rolled(Replaced):
    """Memory rows in two sets of arrays; those that exist stand last, the oldest first."""

    shaped = False

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

    def _slots(self, row: int) -> Iterable[tuple[str, Array]]:
        """Views [M, ...] of one sequence's tensors."""
        for state, array in zip(self._states, self._of(row).arrays, strict=True):
            assert array is not None
            assert state.row_axis is not None
            yield state.name, np.moveaxis(array, state.row_axis, 1)[row]


class Ring(HostPlacement):
    """One array for all tensors, each bound as input and as output of a program that writes rows in place.

    Where a step ends beyond the ring, the rows it spilled go to the front: at most L rows, once per lap.

    Attributes:
        all: [tensors, B, H, slots and those to spill into, d_head], so that rows of all tensors move in one copy.
        tensors: each of them, by its name.
    """

    def __init__(self, states: Sequence[StateTensor], initial: Initial, counters: Counters) -> None:
        super().__init__(states, initial, counters)
        first = states[0]
        assert first.slots is not None
        self._ring = first.slots
        self._starts = [start_of(state, initial[state.name]) for state in states]
        self.all: Array = np.zeros((len(states), *first.shape), np.dtype(first.dtype))
        self.tensors = {state.name: self.all[i] for i, state in enumerate(states)}

    def bound(self, program: Program, side: int) -> tuple[Arrays, Arrays]:
        inputs = {state.input: self.tensors[state.name] for state in self._states}
        return inputs, {state.output: self.tensors[state.name] for state in self._states}

    def spill(self, row: int, count: int) -> None:
        rows = self.all[:, row]  # [tensors, H, C, d_head]
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
        for tensor, start in zip(self.all, self._starts, strict=True):
            tensor[rows] = start

    def reorder(self, rows: Indices, side: int) -> None:
        kept = self.all[:, rows]
        self.clear(np.arange(self._batch))
        self.all[:, : len(rows)] = kept


PLACEMENTS: dict[str, type[HostPlacement]] = {"replace": Replaced, "rolled": Rolled, "ring": Ring}
"""By the update rule of a state."""


def open_placements(states: Sequence[StateTensor], initial: Initial, counters: Counters) -> tuple[HostPlacement, ...]:
    """Fresh states, those of each placement together."""
    return tuple(placement(some, initial, counters) for placement, some in placed_alike(states, PLACEMENTS))
