"""The states of a loop on the CPU: arrays that programs are bound to, one class for each placement.

What is replaced and what is rolled is written anew by every step, from one set of arrays into the other: it has two
sides. A ring stays where it is and takes the segment's rows in place. How far each sequence has come, and on which side
it stands, is kept apart, in `SequenceCounters`. Arrays are of the programs' types; memory rows come out as float32.

A further placement is a class here and on the device, each with an entry of `PLACEMENTS`, and a rule that
`bundle/tables.py` names and `bundle/agreement.py` holds its states to.
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
    """See `streaming.state.Placement`; what the loop on the CPU asks besides.

    Args:
        initial: what they start as, from `initial_values`.

    Attributes:
        shapes: on either side, of states whose shapes decide which program runs.
    """

    shapes: Sequence[Shapes] = ((), ())
    grows: ClassVar[bool] = False
    """Whether shapes can be others after a step than before."""

    def __init__(self, states: Sequence[StateTensor], initial: Initial, counters: SequenceCounters) -> None:
        self._states, self._counters, self._batch = states, counters, len(counters.valid)
        self._starts = {s.name: start_of(s, initial[s.name].astype(np.dtype(s.dtype))) for s in states}

    def bound(self, program: Program, side: int) -> tuple[Arrays, Arrays]:
        """Arrays of all B sequences to bind as a program's inputs and outputs, where sequences stand on this side."""
        raise NotImplementedError

    def kept(self, outputs: Collection[str], side: int) -> Iterable[tuple[Array, Array]]:
        """Of the states that programs return by these names, what stands on this side and what is written, [B, ...]."""
        return ()

    def call(self, engine: Engine, program: Program, side: int, taken: Arrays, returned: Arrays) -> Call:
        """The call of a program where shapes may change; what it takes and returns beside these states is given."""
        raise NotImplementedError

    def join(self, row: int, side: int) -> None:
        """Copy a sequence to this side from the other one; what has one side is there already."""
        return


class Replaced(HostPlacement):
    """Two sets of arrays that a step reads and writes in turn.

    A state without an axis for sequences is shared: it stays unless all sequences are cleared or one state is put.

    Attributes:
        sides: the arrays on either side, by the names of the states that there are.
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
                before, after = (one[..., None] for one in pair)  # so that one sequence's part is an array, too
                yield before, after

    def join(self, row: int, side: int) -> None:
        # A tensor that all sequences share never comes here: `agreement` lets no such model leave B open.
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
        for side in range(2):  # on both, so that nothing is left of who stood there
            for state, array in self._there(side):
                if every or state.batch_axis is not None:
                    array[state.axes.at(rows)] = self._start(state, array)

    def reorder(self, rows: Indices, side: int) -> None:
        moved = self._counters.sides[rows] != side
        for state, array in self._there(side):
            if state.batch_axis is not None:
                kept = array[state.axes.at(rows)]
                if moved.any():
                    kept[state.axes.at(moved)] = self.sides[1 - side][state.name][state.axes.at(rows[moved])]
                array[state.axes.at(slice(len(rows)))] = kept
                array[state.axes.at(slice(len(rows), None))] = self._start(state, array)

    def written(self, side: int) -> Iterable[tuple[StateTensor, Array]]:
        return self._there(side)

    def _side(self, row: int) -> int:
        return int(self._counters.sides[row])

    def _there(self, side: int) -> Iterator[tuple[StateTensor, Array]]:
        """The states that there are on a side."""
        return ((state, self.sides[side][state.name]) for state in self._states if state.name in self.sides[side])

    def _fresh(self, side: int) -> dict[str, Array]:
        """Arrays for what stands on a side before anything was seen."""
        return {state.name: np.zeros(state.shape, np.dtype(state.dtype)) for state in self._states}

    def _start(self, state: StateTensor, array: Array) -> Array:
        """What sequences start as, in an array of the state."""
        return self._starts[state.name]


class Rolled(Replaced):
    """Memory rows in two sets of arrays; those that exist stand last, the oldest first."""

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
        """Views [M, ...] of one sequence's tensors."""
        return ((state.name, state.axes.rows(array)[row]) for state, array in self._there(self._side(row)))


class Ring(HostPlacement):
    """One array for all tensors, each bound as input and as output of a program that writes rows in place.

    Where a step ends beyond the ring, the rows it spilled go to the front: at most L rows, once per lap.

    Attributes:
        all: [tensors, B, H, slots and those to spill into, d_head], so that rows of all tensors move in one copy.
        tensors: each of them, by its name.
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
        for name, tensor in self.tensors.items():
            tensor[rows] = self._starts[name]

    def reorder(self, rows: Indices, side: int) -> None:
        kept = self.all[:, rows]
        self.clear(np.arange(self._batch))
        self.all[:, : len(rows)] = kept


PLACEMENTS: dict[str, type[HostPlacement]] = {"replace": Replaced, "rolled": Rolled, "ring": Ring}
"""By the update rule of a state."""


def open_placements(
    states: Sequence[StateTensor],
    initial: Initial,
    counters: SequenceCounters,
    replaced: type[HostPlacement] = Replaced,
) -> tuple[HostPlacement, ...]:
    """Fresh states, those of each placement together; `replaced` is the class of states that steps return whole."""
    known = placed_alike(states, {**PLACEMENTS, "replace": replaced})
    return tuple(placement(some, initial, counters) for placement, some in known)
