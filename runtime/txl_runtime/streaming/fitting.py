"""Whether a snapshot fits the stream that is to continue from it: all of it is checked before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import StateTensor
from txl_runtime.errors import UsageError
from txl_runtime.streaming.checks import brief, shown
from txl_runtime.streaming.snapshot import StreamState
from txl_runtime.streaming.state import RowState
from txl_runtime.streaming.states import by_name, check_reached, check_states, parted


def check_fits(state: StreamState, manifest: Manifest, states: Sequence[StateTensor], batch_size: int) -> None:
    """Hold a snapshot against the stream that is to continue from it. NaN and infinities are restored as they are.

    Args:
        state: the snapshot.
        manifest: of the stream's bundle.
        states: the stream's own state table.
        batch_size: b, its number of sequences.

    Raises:
        UsageError: the snapshot is of another model, form of memory or number of sequences, or its parts do not fit.
    """
    if not isinstance(state, StreamState):
        raise UsageError(f"the state is a {type(state).__name__}, expected a StreamState; StreamState.load reads one")
    if state.model_id != manifest.model_id:
        raise UsageError(
            f"the state belongs to model {str(state.model_id)[:12] or 'unknown'}, this bundle is "
            f"{manifest.model_id[:12]}; restore it in the model it was taken from"
        )
    fill, head = state.fill, state.head
    if not _counts(fill):
        raise UsageError(f"the state's fill is {_shown(fill)}, expected int32 [{batch_size}]; take it again")
    if state.batch_size != batch_size:
        raise UsageError(
            f"the state holds {state.batch_size} sequences, this stream has {batch_size}; "
            f"open it with model.stream({state.batch_size})"
        )
    if (state.states is None) != manifest.can.count_rows:
        held, kept = ("memory rows", "whole tensors") if state.states is None else ("whole tensors", "memory rows")
        raise UsageError(f"the state holds {held}, this model carries {kept}; restore a state of the same form")
    tensors = state.memory if state.states is None else state.states
    if not by_name(tensors):
        raise UsageError(f"the state's tensors are {shown(tensors)}, expected arrays by name; take it again")
    if state.states is not None:
        check_states(state.states, states, batch_size, "the state")
        check_reached(state.states, manifest, states, "the state")
        return
    if (fill < 0).any() or (fill > manifest.memory_length).any():
        raise UsageError(f"the state's fill is {fill.tolist()}, expected 0 … {manifest.memory_length}; take it again")
    if head is not None and (not _counts(head) or head.shape != fill.shape):
        raise UsageError(f"the state's head is {_shown(head)}, expected int32 {list(fill.shape)}; take it again")
    rows, known = int(fill.max(initial=0)), {spec.name: spec for spec in states}
    for name in sorted({*known, *state.memory}):
        found, spec = state.memory.get(name), known.get(name)
        expected = "no such tensor" if spec is None else f"float32 {[batch_size, rows, *spec.row_shape]}"
        if found is None or spec is None or _shown(found) != expected:
            raise UsageError(
                f"the state's {brief(name)} is {_shown(found)}, expected {expected}; "
                "restore a state of a bundle that keeps the same form of memory"
            )


def fitting_parts(
    state: StreamState, manifest: Manifest, table: Sequence[StateTensor], batch_size: int
) -> Iterable[RowState]:
    """The sequences of a snapshot, one by one, to be put into a stream; arguments and errors as of `check_fits`."""
    check_fits(state, manifest, table, batch_size)
    if state.states is not None:
        return parted(state.states, table, batch_size)
    rows = int(state.fill.max(initial=0))
    heads = np.zeros_like(state.fill) if state.head is None else state.head
    return (
        RowState(count, head, {name: memory[row, rows - count :] for name, memory in state.memory.items()})
        for row, (count, head) in enumerate(zip(state.fill.tolist(), heads.tolist(), strict=True))
    )


def _counts(found: object) -> bool:
    return isinstance(found, np.ndarray) and found.ndim == 1 and np.issubdtype(found.dtype, np.integer)


def _shown(found: object) -> str:
    if isinstance(found, np.ndarray):
        return f"{found.dtype} {list(found.shape)}"
    return "absent" if found is None else type(found).__name__
