"""States of rule "replace" that may be absent at first, or whose number of rows may change in a step, e.g. a K/V cache.

Only models with such states use this module.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from txl_runtime.bundle.tables import Program, StateTensor
from txl_runtime.host.engine import Engine
from txl_runtime.host.placements import Replaced
from txl_runtime.streaming.programs import Shape, Shapes, leaves_rows_open, shapes_after, start_shape
from txl_runtime.streaming.state import Initial, SequenceCounters, with_sequence
from txl_runtime.types import Array, Arrays, Call, Indices


class Growing(Replaced):
    """States of rule "replace" whose shapes change. A side holds reused arrays, or the new arrays that a program
    returned.

    A step may put arrays of different shapes on the side to which it writes. Arrays of equal shape are used again.
    """

    grows = True

    def __init__(self, states: Sequence[StateTensor], initial: Initial, counters: SequenceCounters) -> None:
        self._sets: dict[tuple[Shapes, int], dict[str, Array]] = {}
        self._pool: dict[tuple[str, Shape, int], Array] = {}
        self._begin: Shapes = tuple(start_shape(state) for state in states)
        self.shapes: list[Shapes] = [self._begin, self._begin]
        super().__init__(states, initial, counters)

    def call(self, engine: Engine, program: Program, side: int, taken: Arrays, returned: Arrays) -> Call:
        read = {spec.name: spec for spec in program.inputs}
        if leaves_rows_open(program):

            def opened() -> None:
                held = {s.input: array for s, array in self._there(side) if s.input in read}
                results = engine.run(program, {**taken, **held})
                for name, array in returned.items():
                    np.copyto(array, results[name])
                self._stand(1 - side, {state.name: results[state.output] for state in self._states})

            return opened
        before = self._set(tuple(read[s.input].fixed if s.input in read else None for s in self._states), side)
        after = self._set(shapes_after(program, self._states), 1 - side)
        inputs = {state.input: before[state.name] for state in self._states if state.name in before}
        outputs = {state.output: after[state.name] for state in self._states}
        run = engine.bind(program, {**taken, **inputs}, {**returned, **outputs})

        def call() -> None:
            _copy(self.sides[side], before)
            run()
            self._stand(1 - side, after)

        return call

    def put(self, row: int, tensors: Arrays) -> None:
        """See `Placement`. If a tensor's number of rows changes, the other sequences' rows become zero."""
        side = self._side(row)
        held = [self.sides[side].get(state.name) for state in self._states]
        arrays = with_sequence(self._states, held, row, tensors, self._batch)
        unchanged = self._set(tuple(None if array is None else array.shape for array in arrays), side)
        _copy(
            {state.name: array for state, array in zip(self._states, arrays, strict=True) if array is not None},
            unchanged,
        )
        self._stand(side, unchanged)

    def clear(self, rows: Indices) -> None:
        """See `Placement`. If all sequences are cleared, the states get their first shapes again."""
        if len(np.unique(rows)) == self._batch:
            self._stand(self._counters.side, self._fresh(self._counters.side))
        super().clear(rows)

    def _fresh(self, side: int) -> dict[str, Array]:
        return self._set(self._begin, side)

    def _start(self, state: StateTensor, array: Array) -> Array:
        """Return the sequences' first value; zero for an array whose number of rows has changed."""
        same = array.shape == start_shape(state)
        return self._starts[state.name] if same else np.zeros((), array.dtype)

    def _set(self, shapes: Shapes, side: int) -> dict[str, Array]:
        """Return the arrays of these shapes to which programs are bound; each set of arrays is made once."""
        if (shapes, side) not in self._sets:
            there = ((state, shape) for state, shape in zip(self._states, shapes, strict=True) if shape is not None)
            self._sets[shapes, side] = {state.name: self._array(state, shape, side) for state, shape in there}
        return self._sets[shapes, side]

    def _array(self, state: StateTensor, shape: tuple[int, ...], side: int) -> Array:
        key = state.name, shape, side
        if key not in self._pool:
            self._pool[key] = np.zeros(shape, np.dtype(state.dtype))
        return self._pool[key]

    def _stand(self, side: int, arrays: dict[str, Array]) -> None:
        present = (arrays.get(state.name) for state in self._states)
        self.sides[side], self.shapes[side] = arrays, tuple(None if array is None else array.shape for array in present)


def _copy(arrays: Arrays, to: Arrays) -> None:
    """Copy each array to the array of the same name, unless both are one object; ignore names on only one side."""
    for name, own in to.items():
        array = arrays.get(name)
        if array is not None and array is not own:
            np.copyto(own, array)
