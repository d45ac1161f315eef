"""The states of a loop on the CPU: arrays that programs are bound to, one class for each placement.

What is replaced and what is rolled is written anew by every step, from one set of arrays into the other: it has two
sides. A ring stays where it is and takes the segment's rows in place. How far each sequence has come, and on which side
it stands, is kept apart, in `Counters`. Arrays are of the programs' types; memory rows come out as float32.

A further placement is a class here and an entry of `PLACEMENTS`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from txl_runtime.bundle.tables import Program, StateTensor
from txl_runtime.streaming.programs import Shapes, shapes_after, start_shape
from txl_runtime.streaming.state import Counters, Initial, Placement, placed_alike, ring_rows, start_of, with_sequence
from txl_runtime.types import Array, Arrays, Call, Indices

States: TypeAlias = Sequence[Array | None]
"""Arrays of all B sequences, in the order of the table; None for a state that is absent."""


class HostPlacement(Placement):
    """See `streaming.state.Placement`; what the loop on the CPU asks besides.

    Args:
        states: of the bundle's table.
        initial: what they start as, from `initial_values`.
        counters: of the loop.

    Attributes:
        chooses: whether the shapes of its states decide which program runs.
    """

    chooses = False

    def __init__(self, states: Sequence[StateTensor], initial: Initial, counters: Counters) -> None:
        self._states, self._counters, self._batch = states, counters, len(counters.valid)
        typed = ((state, initial[state.name].astype(np.dtype(state.dtype))) for state in states)
        self._starts = [start_of(state, value) for state, value in typed]

    def bound(self, program: Program, side: int) -> tuple[Arrays, Arrays]:
        """Arrays of all B sequences to bind as a program's inputs and outputs, where sequences stand on this side."""
        raise NotImplementedError

    def around(self, program: Program, side: int, call: Call) -> Call:
        """The call of a program that was bound so, with what has to be done before and after it."""
        return call

    def join(self, row: int, side: int) -> None:
        """Copy a sequence to this side from the other one; what has one side is there already."""
        return


class Replaced(HostPlacement):
    """Two sets of arrays that a step reads and writes in turn.

    A state may be absent at first, and may have other rows after a step than before. So there is a pair of sets for all
    shapes that programs are bound to, or a set is what a program with open rows returned. A state without an axis for
    sequences is shared: it stays unless all sequences are cleared or one state is put.

    Attributes:
        sides: the arrays that stand on either side. Where no sequence stands, a step may put others.
        shapes: those of either side.
        grows: whether a state can have other shapes after a step than before.
    """

    chooses = True

    def __init__(self, states: Sequence[StateTensor], initial: Initial, counters: Counters) -> None:
        super().__init__(states, initial, counters)
        self._sets: dict[tuple[Shapes, int], States] = {}
        self._fresh: Shapes = tuple(start_shape(state) for state in states)
        self.grows = any(state.absent or state.rows is not None for state in states)
        self.shapes, self.sides = [self._fresh] * 2, [self._set(self._fresh, side) for side in range(2)]

    def bound(self, program: Program, side: int) -> tuple[Arrays, Arrays]:
        before, after = (zip(self._states, arrays, strict=True) for arrays in self._sets_of(program, side))
        inputs = {state.input: array for state, array in before if array is not None}
        return inputs, {state.output: array for state, array in after if array is not None}

    def around(self, program: Program, side: int, call: Call) -> Call:
        if not self.grows:
            return call
        before, after = self._sets_of(program, side)

        def grown() -> None:
            _copy(self.sides[side], before)
            call()
            self._stand(1 - side, after)

        return grown

    def inputs(self, side: int) -> dict[str, Array]:
        """What stands on a side, by the names that programs read it under."""
        pairs = zip(self._states, self.sides[side], strict=True)
        return {state.input: array for state, array in pairs if array is not None}

    def adopt(self, side: int, returned: Arrays) -> None:
        """Let what a program returned stand on a side as it is."""
        self._stand(side, [returned[state.output] for state in self._states])

    def join(self, row: int, side: int) -> None:
        for state, to, array in zip(self._states, self.sides[side], self.sides[1 - side], strict=True):
            if to is not None and array is not None and state.batch_axis is not None:
                to[state.axes.at(row)] = array[state.axes.at(row)]

    def take(self, row: int, fill: int, names: Collection[str] | None) -> dict[str, Array]:
        pairs = zip(self._states, self._of(row), strict=True)
        wanted = ((s, a) for s, a in pairs if a is not None and (names is None or s.name in names))
        return {state.name: np.array(state.axes.one(array, row)) for state, array in wanted}

    def put(self, row: int, tensors: Arrays) -> None:
        """See `Placement`. Where a tensor has another number of rows than before, other sequences have zeros there."""
        arrays = with_sequence(self._states, self._of(row), row, tensors, self._batch)
        side = int(self._counters.sides[row])
        kept = self._set(_shapes(arrays), side)
        _copy(arrays, kept)
        self._stand(side, kept)

    def clear(self, rows: Indices) -> None:
        """See `Placement`. States that grow begin anew when all sequences do."""
        every, sides = len(np.unique(rows)) == self._batch, self._counters.sides[rows]
        for side in {*sides.tolist()}:
            if every:
                self._stand(side, self._set(self._fresh, side))
            for index, state in enumerate(self._states):
                if every or state.batch_axis is not None:
                    self._begin(index, side, state.axes.at(rows[sides == side]))

    def reorder(self, rows: Indices, side: int) -> None:
        moved = self._counters.sides[rows] != side
        for index, (state, array, other) in enumerate(
            zip(self._states, self.sides[side], self.sides[1 - side], strict=True)
        ):
            if array is None or state.batch_axis is None:
                continue
            kept = array[state.axes.at(rows)]
            if other is not None and moved.any():
                kept[state.axes.at(moved)] = other[state.axes.at(rows[moved])]
            array[state.axes.at(slice(len(rows)))] = kept
            self._begin(index, side, state.axes.at(slice(len(rows), None)))

    def written(self, side: int) -> Iterable[tuple[StateTensor, Array]]:
        return [(s, array) for s, array in zip(self._states, self.sides[side], strict=True) if array is not None]

    def _of(self, row: int) -> States:
        return self.sides[int(self._counters.sides[row])]

    def _set(self, shapes: Shapes, side: int) -> States:
        """The arrays of some shapes that programs are bound to."""
        if (shapes, side) not in self._sets:
            pairs = zip(self._states, shapes, strict=True)
            made = [None if shape is None else np.zeros(shape, np.dtype(state.dtype)) for state, shape in pairs]
            self._sets[shapes, side] = made
        return self._sets[shapes, side]

    def _sets_of(self, program: Program, side: int) -> tuple[States, States]:
        """What a program that leaves no rows open reads where sequences stand on this side, and what it writes."""
        taken = {spec.name: spec.fixed for spec in program.inputs}
        before = tuple(taken.get(state.input) for state in self._states)
        return self._set(before, side), self._set(shapes_after(program, self._states), 1 - side)

    def _stand(self, side: int, arrays: States) -> None:
        self.sides[side], self.shapes[side] = arrays, _shapes(arrays)

    def _begin(self, index: int, side: int, key: Any) -> None:
        """Let a part of a state be what it is before anything was seen; zeros where it has other rows by now."""
        array = self.sides[side][index]
        if array is not None:
            array[key] = self._starts[index] if array.shape == self._fresh[index] else 0


class Rolled(Replaced):
    """Memory rows in two sets of arrays; those that exist stand last, the oldest first."""

    chooses = False

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
        for state, array in zip(self._states, self._of(row), strict=True):
            assert array is not None, "memory rows are never absent"
            yield state.name, state.axes.rows(array)[row]


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


def _shapes(arrays: States) -> Shapes:
    return tuple(None if array is None else array.shape for array in arrays)


def _copy(arrays: States, to: States) -> None:
    """Copy what stands in some arrays to others, where these are others; what only one side has is left alone."""
    if arrays is not to:
        for array, own in zip(arrays, to, strict=True):
            if array is not None and own is not None and own is not array:
                np.copyto(own, array)
