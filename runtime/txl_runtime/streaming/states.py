"""States in the shapes of the bundle's table: put together from single sequences, taken apart, checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import StateTensor
from txl_runtime.errors import UsageError
from txl_runtime.streaming.checks import brief, is_whole, shown
from txl_runtime.streaming.state import RowState
from txl_runtime.types import Array, Arrays, Floats


def with_all_rows(memory: Mapping[str, Floats], table: Sequence[StateTensor], most: int) -> dict[str, Array]:
    """Memory rows [b, rows, ...] in the table's shapes, `most` rows of them; the newest stand last."""
    shown: dict[str, Array] = {}
    for state in table:
        rows = memory[state.name]
        assert state.row_axis is not None
        axes = (*state.shape[: state.row_axis], most, *state.shape[state.row_axis + 1 :])
        after = np.zeros((len(rows), *axes[1:]), np.float32)
        np.moveaxis(after, state.row_axis, 1)[:, most - rows.shape[1] :] = rows
        shown[state.name] = after
    return shown


def gathered(parts: Sequence[RowState], table: Sequence[StateTensor]) -> dict[str, Array]:
    """The whole tensors of some sequences; one that is shared is the first one's."""
    first = parts[0].tensors
    return {
        state.name: first[state.name]
        if state.batch_axis is None
        else np.stack([part.tensors[state.name] for part in parts], axis=state.batch_axis)
        for state in table
        if state.name in first
    }


def parted(tensors: Arrays, table: Sequence[StateTensor], batch_size: int) -> Iterator[RowState]:
    """The states of single sequences that `gathered` put together."""
    axes = {state.name: state.batch_axis for state in table}
    for row in range(batch_size):
        yield RowState(
            0,
            0,
            {
                name: tensor if axis is None else tensor.take(row, axis)
                for name, tensor in tensors.items()
                for axis in (axes[name],)
            },
        )


def check_states(tensors: Arrays, table: Sequence[StateTensor], batch_size: int | None, what: str) -> None:
    """Hold tensors against the table.

    Args:
        tensors: by name.
        table: of the stream.
        batch_size: b, in place of the bundle's batch size; None for tensors of one sequence, without its axis.
        what: they are, for the message.

    Raises:
        UsageError: one is missing, unknown, or of another type or shape.
    """
    known = {state.name: state for state in table}
    for name in sorted({*known, *tensors}):
        found, state = tensors.get(name), known.get(name)
        if state is None:
            raise UsageError(f"{what} has {brief(name)}, expected {', '.join(known) or 'nothing'}; take it again")
        if found is None and state.absent:
            continue
        sizes: list[str] = [
            str(batch_size) if axis == state.batch_axis else _size(state, axis)
            for axis in range(len(state.shape))
            if batch_size is not None or axis != state.batch_axis
        ]
        if not isinstance(found, np.ndarray) or found.dtype != state.dtype or not _fits(state, found, batch_size):
            has = "absent" if found is None else type(found).__name__
            if isinstance(found, np.ndarray):
                has = f"{found.dtype} {list(found.shape)}"
            raise UsageError(
                f"{what}'s {name} is {has}, expected {state.dtype} [{', '.join(sizes)}]; take it again, or put it "
                "into the model it was taken from"
            )


def check_reached(tensors: Arrays, manifest: Manifest, table: Sequence[StateTensor], what: str) -> None:
    """Hold the rows of states that grow against those that the bundle's programs take.

    Args:
        tensors: checked, with or without the axis of sequences.
        manifest: of the bundle.
        table: of the stream.
        what: they are, for the message.

    Raises:
        UsageError: a state has a number of rows that no step leads to.
    """
    specs = [spec for program in manifest.programs for spec in (*program.inputs, *program.outputs)]
    for state in table:
        found = tensors.get(state.name)
        if found is None or state.rows is None or state.row_axis is None:
            continue
        reached = {spec.shape[state.row_axis] for spec in specs if spec.name in (state.input, state.output)} | {0}
        axis = state.row_axis
        if found.ndim < len(state.shape) and state.batch_axis is not None and state.batch_axis < axis:
            axis -= 1
        if "rows" not in reached and found.shape[axis] not in reached:
            raise UsageError(
                f"{what}'s {state.name} has {found.shape[axis]} rows, expected one of {sorted(map(int, reached))}; "
                "take it again, or put it into the bundle it was taken from"
            )


def check_row(state: RowState, manifest: Manifest, table: Sequence[StateTensor]) -> None:
    """Hold the state of one sequence against a model.

    Raises:
        UsageError: it does not fit.
    """
    if not isinstance(state, RowState):
        raise UsageError(f"the state is a {type(state).__name__}, expected what Stream.take returned")
    if not by_name(state.tensors):
        raise UsageError(f"the sequence's tensors are {shown(state.tensors)}, expected what Stream.take returned")
    if "fill" not in manifest.counters:
        check_states(state.tensors, table, None, "the sequence")
        check_reached(state.tensors, manifest, table, "the sequence")
        return
    fill, most = state.fill, manifest.memory_length
    if not is_whole(fill) or not 0 <= fill <= most or not is_whole(state.head):
        raise UsageError(
            f"the sequence's fill is {shown(fill)} and its head {shown(state.head)}, expected 0 … {most} and a whole "
            "number; take it again"
        )
    expected = {entry.name: ("float32", (fill, *entry.row_shape)) for entry in table}
    found = {name: _kind(tensor) for name, tensor in state.tensors.items()}
    for name in sorted({*expected, *found}):
        if found.get(name) != expected.get(name):
            raise UsageError(
                f"the sequence's {brief(name)} is {_told(found.get(name))}, expected {_told(expected.get(name))}; "
                "take it again, or put it into the model it was taken from"
            )


def by_name(tensors: object) -> bool:
    """Whether it is a dict of something by name."""
    return isinstance(tensors, Mapping) and all(isinstance(name, str) for name in tensors)


def _fits(state: StateTensor, found: Array, batch_size: int | None) -> bool:
    shape = list(state.shape)
    rows = None if state.rows is None else state.row_axis
    axes = [axis for axis in range(len(shape)) if batch_size is not None or axis != state.batch_axis]
    if found.ndim != len(axes):
        return False
    for axis, size in zip(axes, found.shape, strict=True):
        if axis == rows:
            assert state.rows is not None
            if not state.rows[0] <= size <= state.rows[1]:
                return False
        elif size != (batch_size if axis == state.batch_axis else shape[axis]):
            return False
    return True


def _size(state: StateTensor, axis: int) -> str:
    grows = state.rows is not None and axis == state.row_axis
    return f"{state.rows[0]} … {state.rows[1]}" if state.rows is not None and grows else str(state.shape[axis])


def _kind(tensor: object) -> tuple[str, tuple[int, ...]]:
    return (str(tensor.dtype), tensor.shape) if isinstance(tensor, np.ndarray) else (type(tensor).__name__, ())


def _told(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if tensor is None else f"{tensor[0]} {list(tensor[1])}"
