"""Loops over states that every step returns whole, update rule "replace", wherever the tensors lie.

Two sets of tensors take turns: a step reads one and writes the other, and is committed when the other becomes the one
that is held. A tensor may be absent before the first step or have no rows yet; so its shape is a part of what is held,
and decides with the segment's length which program runs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Output as OutputRow
from txl_runtime.bundle.tables import Program, StateTensor
from txl_runtime.errors import UsageError
from txl_runtime.streaming.memory import RowsResult
from txl_runtime.streaming.outputs import Output
from txl_runtime.streaming.state import Initial, RowState
from txl_runtime.types import Array, Arrays, Floats, Ids, Indices

Shape: TypeAlias = tuple[int, ...] | None
"""Of one state; None for one that is absent."""
Shapes: TypeAlias = tuple[Shape, ...]
"""Of every state, in the order of the table."""


def start_shape(state: StateTensor) -> Shape:
    """The shape of a state before anything was seen."""
    if state.absent:
        return None
    if state.rows is None or state.row_axis is None:
        return state.shape
    return tuple(state.rows[0] if axis == state.row_axis else size for axis, size in enumerate(state.shape))


def shapes_after(program: Program, states: Sequence[StateTensor]) -> tuple[tuple[int, ...], ...]:
    """The shapes of the states that a program returns; it may leave no size open."""
    returned = {spec.name: spec for spec in program.outputs}
    return tuple(returned[state.output].fixed for state in states)


def leaves_rows_open(program: Program) -> bool:
    """Whether the program takes states of any number of rows."""
    return any("rows" in spec.shape for spec in (*program.inputs, *program.outputs))


class StepPrograms:
    """Which program runs: the one of the segment length and the state shapes that are held.

    Args:
        manifest: of the bundle.
        programs: of kind "step".
    """

    def __init__(self, manifest: Manifest, programs: Sequence[Program]) -> None:
        self._states, self._exact = manifest.states_of("replace"), manifest.lengths == "exact"
        self._programs = sorted(programs, key=lambda program: (program.segment_length, leaves_rows_open(program)))
        self._timed = [entry for entry in manifest.inputs if "L" in entry.shape]
        self._found: dict[tuple[int, Shapes], Program] = {}

    def length_of(self, inputs: Mapping[str, Any]) -> int:
        """T of a segment's inputs; 1 where no input has positions."""
        for entry in self._timed:
            if entry.name in inputs:
                return int(inputs[entry.name].shape[entry.shape.index("L")]) - entry.lookahead
        return 1

    def find(self, length: int, shapes: Shapes) -> Program:
        """The program for a segment of T positions: of that length, or the shortest that holds it.

        Raises:
            UsageError: there is none for these shapes.
        """
        found = self._found.get((length, shapes))
        if found is None:
            fitting = [program for program in self._programs if self._fits(program, length, shapes)]
            if not fitting:
                held = [f"{s.name} {_shown(shape)}" for s, shape in zip(self._states, shapes, strict=True)]
                known = sorted({program.segment_length for program in self._programs})
                raise UsageError(
                    f"a segment of {length} positions came with state {', '.join(held)}, expected a length and shapes "
                    f"that a program takes (lengths {known}); reset the stream, or feed segments of one length"
                )
            found = self._found[length, shapes] = fitting[0]
            if len(self._found) > 4096:  # states that grow row by row have ever new shapes
                self._found.clear()
        return found

    def _fits(self, program: Program, length: int, shapes: Shapes) -> bool:
        longest = program.segment_length
        if longest < length or (self._exact and longest != length):
            return False
        taken = {spec.name: spec.shape for spec in program.inputs}
        pairs = zip(self._states, shapes, strict=True)
        return all(_takes(taken.get(state.input), shape) for state, shape in pairs)


class StepState:
    """The half of a loop that does not depend on where its tensors lie: `held` and `hold` are the other half's.

    The methods are those of `streaming.loop.Loop`. A state without an axis for sequences is shared: it is what it was
    unless all sequences are cleared or one state is put.

    Args:
        manifest: of the bundle.
        initial: what states start as, from `initial_values`.
        lock: held while tensors are changed or read.
    """

    def __init__(self, manifest: Manifest, initial: Initial, lock: AbstractContextManager[object]) -> None:
        self.states = manifest.states_of("replace")
        self._batch, self._lock = manifest.batch_size, lock
        self._starts = tuple(_start(state, initial[state.name]) for state in self.states)

    @property
    def fill(self) -> Ids:
        """See `Loop`; there are no memory rows that anybody counts."""
        return np.zeros(self._batch, np.int32)

    @property
    def heads(self) -> Ids:
        """See `Loop`."""
        return np.zeros(self._batch, np.int32)

    @abstractmethod
    def held(self) -> list[Array | None]:
        """Every state on the host, in the table's order, as [.., B, ..]; None for one that is absent.

        The caller may write to the arrays if it hands them to `hold` afterwards.
        """

    @abstractmethod
    def hold(self, arrays: Sequence[Array | None]) -> None:
        """Make these the states, whatever their shapes; some may be the very arrays that `held` gave."""

    def clear(self, rows: Indices) -> None:
        """See `Loop`. States that grow begin anew when all sequences do."""
        with self._lock:
            if len(np.unique(rows)) == self._batch:
                self.hold(self._starts)
                return
            arrays = self.held()
            for state, start, array in zip(self.states, self._starts, arrays, strict=True):
                if array is not None and state.batch_axis is not None:
                    key = at(state.batch_axis, rows)
                    array[key] = start[key] if start is not None and start.shape == array.shape else 0
            self.hold(arrays)

    def reorder(self, rows: Indices) -> None:
        """See `Loop`."""
        with self._lock:
            arrays = self.held()
            for index, (state, start, array) in enumerate(zip(self.states, self._starts, arrays, strict=True)):
                if array is not None and state.batch_axis is not None:
                    same = start is not None and start.shape == array.shape
                    after = np.array(start) if same else np.zeros_like(array)
                    after[at(state.batch_axis, slice(len(rows)))] = array[at(state.batch_axis, rows)]
                    arrays[index] = after
            self.hold(arrays)

    def take(self, row: int, names: Collection[str] | None = None) -> RowState:
        """See `Loop`; tensors are whole, without the axis of sequences, those that are absent left out."""
        with self._lock:
            tensors = {
                state.name: np.array(array if state.batch_axis is None else array[at(state.batch_axis, row)])
                for state, array in zip(self.states, self.held(), strict=True)
                if array is not None and (names is None or state.name in names)
            }
        return RowState(0, 0, tensors)

    def put(self, row: int, state: RowState) -> None:
        """See `Loop`. Where a tensor has another number of rows than before, other sequences have zeros there."""
        with self._lock:
            arrays = self.held()
            for index, (entry, array) in enumerate(zip(self.states, arrays, strict=True)):
                given = state.tensors.get(entry.name)
                if given is None or entry.batch_axis is None:
                    arrays[index] = None if given is None else np.array(given)
                    continue
                axis = entry.batch_axis
                shape = (*given.shape[:axis], self._batch, *given.shape[axis:])
                after = np.zeros(shape, given.dtype) if array is None or array.shape != shape else array
                after[at(axis, row)] = given
                arrays[index] = after
            self.hold(arrays)


class StepResult(RowsResult):
    """The result of a segment whose program returned whole arrays. See `loop.Result`.

    Args:
        manifest: of the bundle.
        given: what the program returned, by the names of the outputs, as [B, L, ...] or however they are declared.
        counts: int32 [b].
        columns: T.
        targets: [b, T], where the nll will be asked for.
        output: of the loop.
    """

    __slots__ = ("_columns", "_given", "_manifest")

    def __init__(
        self, manifest: Manifest, given: Arrays, counts: Ids, columns: int, targets: Ids | None, output: Output
    ) -> None:
        super().__init__(np.zeros((0, 0, 0), np.float32), counts, targets, output)
        self._manifest, self._given, self._columns = manifest, given, columns

    def arrays(self) -> Arrays:
        """What the program returned; a result that is on its way still is waited for here."""
        return self._given

    def rows(self) -> Floats:
        """See `loop.Result`: the log-probabilities, whatever the order of their axes."""
        output = self._manifest.logprobs
        assert output is not None, "a stream asks for log-probabilities where there are any"
        part = _part(self.arrays()[output.name], output, len(self._counts), self._columns)
        if "L" not in output.shape:
            return part[:, None]
        return part if output.shape[0] == "B" else part.swapaxes(0, 1)

    def outputs(self) -> dict[str, Array]:
        """See `loop.Result`."""
        given, counts = self.arrays(), self._counts
        results = {
            output.name: _part(given[output.name], output, len(counts), self._columns).copy()
            for output in self._manifest.outputs
        }
        if min(counts.tolist()) < self._columns:  # else all of it counts
            for output in self._manifest.outputs:
                clear_uncounted(results[output.name], output.shape, counts)
        return results


def empty_outputs(manifest: Manifest, batch_size: int, length: int) -> dict[str, Array]:
    """Zeros in the shapes of the outputs of B sequences and L positions."""
    return {
        output.name: np.zeros(output.sizes(batch_size, length), np.dtype(output.dtype)) for output in manifest.outputs
    }


def at(axis: int, key: Any) -> tuple[Any, ...]:
    """The index of some entries along an axis."""
    return (*[slice(None)] * axis, key)


def _takes(wanted: tuple[int | str, ...] | None, shape: Shape) -> bool:
    """Whether a program's input, or its lack of one, suits the shape that is held."""
    if wanted is None or shape is None:
        return wanted is None and (shape is None or 0 in shape)
    return len(shape) == len(wanted) and all(size in ("rows", has) for size, has in zip(wanted, shape, strict=True))


def _start(state: StateTensor, value: Array) -> Array | None:
    """A state of all sequences before anything was seen, as a view of its initial value."""
    shape = start_shape(state)
    if shape is None:
        return None
    axis, typed = state.batch_axis, value.astype(np.dtype(state.dtype))
    if axis is None:
        return np.broadcast_to(typed, shape)
    if 0 in shape:
        return np.zeros(shape, typed.dtype)
    one = np.broadcast_to(typed, (*shape[:axis], *shape[axis + 1 :]))
    return np.broadcast_to(np.expand_dims(one, axis), shape)


def _part(array: Array, output: OutputRow, batch_size: int, columns: int) -> Array:
    """A view of what concerns the first b sequences and T positions."""
    known = {"B": slice(batch_size), "L": slice(columns)}
    part: Array = array[tuple(known[size] if isinstance(size, str) else slice(None) for size in output.shape)]
    return part


def clear_uncounted(array: Array, shape: Sequence[int | str], counts: Ids) -> None:
    """Write zeros where nothing counts: beyond a sequence's length, and in idle ones."""
    if "B" not in shape:
        return
    batch = shape.index("B")
    times = [axis for axis, size in enumerate(shape) if size == "L"]
    for time in times:
        view = np.moveaxis(array, (batch, time), (0, 1))
        view[np.arange(view.shape[1]) >= counts[:, None]] = 0
    if not times:
        array[at(batch, counts == 0)] = 0


def _shown(shape: Shape) -> str:
    return "absent" if shape is None else str(list(shape))
