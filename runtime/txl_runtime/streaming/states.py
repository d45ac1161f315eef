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
        after = np.zeros(state.axes.sizes(len(rows), most), np.float32)
        state.axes.rows(after)[:, most - rows.shape[1] :] = rows
        shown[state.name] = after
    return shown


def gathered(parts: Sequence[RowState], table: Sequence[StateTensor]) -> dict[str, Array]:
    """The whole tensors of some sequences; one that is shared is the first one's."""
    return {
        state.name: state.axes.joined([part.tensors[state.name] for part in parts])
        for state in table
        if state.name in parts[0].tensors
    }


def parted(tensors: Arrays, table: Sequence[StateTensor], batch_size: int) -> Iterator[RowState]:
    """The states of single sequences that `gathered` put together."""
    axes = {state.name: state.axes for state in table}
    for row in range(batch_size):
        yield RowState(0, 0, {name: axes[name].one(tensor, row) for name, tensor in tensors.items()})


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
        axes = state.axes.alone if batch_size is None else state.axes
        fewest, most = _row_counts(state)
        fits = isinstance(found, np.ndarray) and found.dtype == state.dtype and found.ndim == len(axes.shape)
        rows = axes.length(found) if fits else -1
        if found is None or not fewest <= rows <= most or found.shape != axes.sizes(batch_size or 0, rows):
            sizes = map(str, axes.filled(str(batch_size), str(most) if fewest == most else f"{fewest} … {most}"))
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
        rows = (state.axes.alone if found.ndim < len(state.shape) else state.axes).length(found)
        if "rows" not in reached and rows not in reached:
            raise UsageError(
                f"{what}'s {state.name} has {rows} rows, expected one of {sorted(map(int, reached))}; "
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
    if not manifest.can.count_rows:
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


def _row_counts(state: StateTensor) -> tuple[int, int]:
    """The fewest and the most rows; 1 of a state that has none, as `Axes.length` says."""
    return state.rows or (1 if state.row_axis is None else state.shape[state.row_axis],) * 2


def _kind(tensor: object) -> tuple[str, tuple[int, ...]]:
    return (str(tensor.dtype), tensor.shape) if isinstance(tensor, np.ndarray) else (type(tensor).__name__, ())


def _told(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if tensor is None else f"{tensor[0]} {list(tensor[1])}"
