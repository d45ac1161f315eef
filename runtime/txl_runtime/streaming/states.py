"""Functions for states by name, as streams return them: join and split sequences, compare states with the table.

A state that `take` returns knows its model, so it can be saved as the snapshot of one sequence.

Memory is returned as float32 [b, rows, ...], the oldest row first; a sequence with fewer rows than the longest has
zeros in front. Every other state has the declared type and shape, with b sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import StateTensor
from txl_runtime.errors import UsageError, brief
from txl_runtime.streaming.checks import is_whole, shown
from txl_runtime.streaming.snapshot import StreamState
from txl_runtime.streaming.state import RowState
from txl_runtime.types import Array, Arrays, Ids


@dataclass(frozen=True)
class TakenState(RowState):
    """The state of one sequence, bound to the model that it was taken from.

    Attributes:
        manifest: the manifest of the stream's bundle.
        table: the stream's state table.
    """

    manifest: Manifest = field(repr=False)
    table: Sequence[StateTensor] = field(repr=False)

    def snapshot(self) -> StreamState:
        """Return the state as the snapshot of a stream of one sequence; the arrays are shared, not copied."""
        return snapshot_of_row(self, self.manifest, self.table)

    def to_bytes(self) -> bytes:
        """Return the bytes of the file that `save` writes; `StreamState.from_bytes` reads them."""
        return self.snapshot().to_bytes()

    def save(self, path: str | Path) -> None:
        """Write a file as `StreamState.save` does; `StreamState.load` reads it."""
        self.snapshot().save(path)


def gathered(parts: Iterable[RowState], table: Sequence[StateTensor], batch_size: int, rows: int) -> dict[str, Array]:
    """Join the tensors of single sequences, by name; leave out a tensor that no sequence has.

    For example, two sequences with [9, 32] and [16, 32] become [2, 16, 32].

    Args:
        parts: the states of the sequences; each state is copied before the iterator is asked for the next state.
        rows: number of memory rows in the result, [b, rows, ...]; a shorter sequence is zero-padded in front.
    """
    joined: dict[str, Array] = {}
    for row, part in enumerate(parts):
        for state in table:
            if state.name not in part.tensors:
                continue
            axes, tensor = state.taken, part.tensors[state.name]
            own = axes.alone.length(tensor)
            if state.name not in joined:
                sizes = axes.filled(batch_size, rows if state.counted else own)
                joined[state.name] = np.zeros(sizes, tensor.dtype)
            whole = joined[state.name]
            whole[axes.at(row, slice(axes.length(whole) - own, None))] = tensor
    return {state.name: joined[state.name] for state in table if state.name in joined}


def as_declared(tensors: Arrays, table: Sequence[StateTensor]) -> dict[str, Array]:
    """Return gathered tensors of M memory rows in the declared order of axes: e.g. [b, M, ...] becomes [M, b, ...].

    With M 16, [2, 16, 32] becomes [16, 2, 32].
    """
    entries = {state.name: (state, tensors[state.name]) for state in table if state.name in tensors}
    return {
        name: np.ascontiguousarray(state.axes.from_rows(array)) if state.counted else array
        for name, (state, array) in entries.items()
    }


def parted(state: StreamState, table: Sequence[StateTensor]) -> Iterator[RowState]:
    """Yield the state of each sequence of a checked snapshot; the arrays are views of the snapshot's arrays."""
    rows, tensors = int(state.fill.max(initial=0)), {**state.memory, **(state.states or {})}
    heads = np.zeros_like(state.fill) if state.head is None else state.head
    held = [(entry, tensors[entry.name]) for entry in table if entry.name in tensors]
    for row, (count, head) in enumerate(zip(state.fill.tolist(), heads.tolist(), strict=True)):
        own = ((entry, entry.taken.at(row, slice(rows - count if entry.counted else 0, None))) for entry, _ in held)
        parts = {entry.name: tensors[entry.name][place] for entry, place in own}
        yield RowState(count, head, parts)


def snapshot_of(
    tensors: Arrays, fill: Ids, heads: Ids, manifest: Manifest, table: Sequence[StateTensor]
) -> StreamState:
    """Return the snapshot of gathered tensors: memory rows in its field `memory`, whole tensors in `states`.

    For example, two sequences of 9 and 16 rows have the fill [9, 16].
    """
    memory, whole = (
        {entry.name: tensors[entry.name] for entry in table if entry.counted is rows and entry.name in tensors}
        for rows in (True, False)
    )
    head, states = heads if manifest.can.count_rows else None, whole if keeps_whole(manifest, table) else None
    return StreamState(manifest.model_id, fill, memory, head, states)


def snapshot_of_row(row: RowState, manifest: Manifest, table: Sequence[StateTensor]) -> StreamState:
    """Return the snapshot of one sequence; its arrays are views of the row's arrays."""
    slots = next((entry.slots for entry in table if entry.slots is not None), 1)
    slot = row.head % slots  # a caller's RowState may hold any whole number, but a file stores int32
    fill, head = (np.array([number], np.int32) for number in (row.fill, slot))
    axes = {entry.name: entry.taken for entry in table}
    tensors = {name: axes[name].joined([array]) for name, array in row.tensors.items()}
    return snapshot_of(tensors, fill, head, manifest, table)


def keeps_whole(manifest: Manifest, table: Sequence[StateTensor]) -> bool:
    """Return whether a snapshot has a field of whole tensors; a snapshot without memory rows has one, even if empty."""
    return not manifest.can.count_rows or any(not entry.counted for entry in table)


def checked_row(state: RowState | StreamState, manifest: Manifest, table: Sequence[StateTensor]) -> RowState:
    """Return the state of one sequence after checking that it fits the model; the state comes from `take` or a file.

    Raises:
        UsageError: the state does not fit the model.
    """
    if isinstance(state, StreamState):
        check_fits(state, manifest, table, 1)
        return next(parted(state, table))
    if not isinstance(state, RowState):
        raise UsageError(
            f"the state is a {type(state).__name__}, expected what Stream.take returned, or a StreamState of one "
            "sequence; StreamState.load reads one"
        )
    if isinstance(state, TakenState):
        _check_model(state.manifest.model_id, manifest)
    if not _by_name(state.tensors):
        raise UsageError(f"the sequence's tensors are {shown(state.tensors)}, expected what Stream.take returned")
    fill, most = state.fill, manifest.memory_length
    if manifest.can.count_rows and not (is_whole(fill) and 0 <= fill <= most and is_whole(state.head)):
        raise UsageError(
            f"the sequence's fill is {shown(fill)} and its head {shown(state.head)}, expected 0 … {most} and a whole "
            "number; take it again"
        )
    _check_tensors(state.tensors, manifest, table, None, fill)
    return state


def check_fits(state: StreamState, manifest: Manifest, table: Sequence[StateTensor], batch_size: int) -> None:
    """Compare a whole snapshot with the stream that is to continue from it, before anything is changed.

    NaN and infinity are allowed.

    Args:
        batch_size: the stream's number of sequences, b.

    Raises:
        UsageError: the snapshot has a different model, form of memory or number of sequences, or a wrong tensor.
    """
    if not isinstance(state, StreamState):
        raise UsageError(
            f"the state is a {type(state).__name__}, expected a StreamState; "
            "StreamState.load reads one, and what take returned is for put"
        )
    _check_model(state.model_id, manifest)
    fill, head, most = state.fill, state.head, manifest.memory_length
    if not _counts(fill):
        raise UsageError(f"the state's fill is {_kind(fill)}, expected int32 [{batch_size}]; take it again")
    if state.batch_size != batch_size:
        raise UsageError(
            f"the state holds {state.batch_size} sequences, expected {batch_size}; open a stream of as many, or take "
            "and put sequences one by one"
        )
    if (state.states is not None) != keeps_whole(manifest, table):
        held, wanted = ("memory rows", "whole tensors") if state.states is None else ("whole tensors", "memory rows")
        raise UsageError(f"the state holds {held}, this model carries {wanted}; restore a state of the same form")
    for tensors in (state.memory, state.states):
        if tensors is not None and not _by_name(tensors):
            raise UsageError(f"the state's tensors are {shown(tensors)}, expected arrays by name; take it again")
    if (fill < 0).any() or (fill > most).any():
        raise UsageError(f"the state's fill is {fill.tolist()}, expected 0 … {most}; take it again")
    if head is not None and (not _counts(head) or head.shape != fill.shape):
        raise UsageError(f"the state's head is {_kind(head)}, expected int32 {list(fill.shape)}; take it again")
    rows, memory, whole = int(fill.max(initial=0)), *([e for e in table if e.counted is kind] for kind in (True, False))
    _check_tensors(state.memory, manifest, memory, batch_size, rows)
    for name in sorted((state.states or {}).keys() - {entry.name for entry in whole}):
        known = ", ".join(entry.name for entry in whole) or "nothing"
        raise UsageError(f"the state has {brief(name)}, expected {known}; take it again")
    _check_tensors(state.states or {}, manifest, whole, batch_size, rows)


def _check_model(model_id: str, manifest: Manifest) -> None:
    if model_id != manifest.model_id:
        raise UsageError(
            f"the state belongs to model {str(model_id)[:12] or 'unknown'}, this bundle is "
            f"{manifest.model_id[:12]}; restore it in the model it was taken from"
        )


def _check_tensors(
    tensors: Arrays, manifest: Manifest, table: Sequence[StateTensor], batch_size: int | None, rows: int
) -> None:
    """Compare tensors with the table's states.

    Args:
        batch_size: number of sequences in the tensors; None if the tensors have no axis of sequences.

    Raises:
        UsageError: a tensor is missing or unknown, or no step returns its type, shape or number of rows.
    """
    what, unknown = ("the sequence", "absent") if batch_size is None else ("the state", "no such tensor")
    known = {state.name: state for state in table}
    for name in sorted({*known, *tensors}):
        tensor, state = tensors.get(name), known.get(name)
        if state is not None:
            if tensor is None and state.absent:
                continue
            axes = state.taken.alone if batch_size is None else state.taken
            fewest, most = (rows, rows) if state.counted else state.row_counts
            ranked = isinstance(tensor, np.ndarray) and tensor.ndim == len(axes.shape)
            held = axes.length(tensor) if ranked else fewest
            wanted = axes.sizes(batch_size or 0, min(max(held, fewest), most))
            if tensor is not None and ranked and tensor.shape == wanted and tensor.dtype == state.taken_dtype:
                _check_reached(state, held, manifest, what)
                continue
            sizes = axes.filled(str(batch_size), str(most) if fewest == most else f"{fewest} … {most}")
            unknown = f"{state.taken_dtype} [{', '.join(map(str, sizes))}]"
        raise UsageError(
            f"{what}'s {brief(name)} is {_kind(tensor)}, expected {unknown}; take it again, or restore a state of a "
            "bundle that keeps the same form of memory"
        )


def _check_reached(state: StateTensor, held: int, manifest: Manifest, what: str) -> None:
    """Check that a growing state has 0 rows, or a number of rows that one of the bundle's programs reads or returns."""
    if state.rows is None or state.row_axis is None:
        return
    specs = [spec for program in manifest.programs for spec in (*program.inputs, *program.outputs)]
    reached = {spec.shape[state.row_axis] for spec in specs if spec.name in (state.input, state.output)} | {0}
    if "rows" not in reached and held not in reached:
        raise UsageError(
            f"{what}'s {state.name} has {held} rows, expected one of {sorted(map(int, reached))}; "
            "take it again, or put it into the bundle it was taken from"
        )


def _by_name(tensors: object) -> bool:
    return isinstance(tensors, Mapping) and all(isinstance(name, str) for name in tensors)


def _counts(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 1 and np.issubdtype(value.dtype, np.integer)


def _kind(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return "absent" if value is None else type(value).__name__
