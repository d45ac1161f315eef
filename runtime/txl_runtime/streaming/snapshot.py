"""The recurrent state of streams, apart from any graph: taken, stored, put back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from txl_runtime.bundle.encoding import write_whole
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import StateTensor
from txl_runtime.errors import TxlError, UsageError
from txl_runtime.types import Array, Floats, Ids

FORMAT = "txl-deploy.state/1"
"""Memory rows."""
WHOLE = "txl-deploy.state/2"
"""Whole tensors by the bundle's table, of any dtype."""


@dataclass(frozen=True)
class StreamState:
    """A copy of the state of b streams, bound to the model it came from.

    Attributes:
        model_id: of the bundle; the state fits every bundle of that model with the same form of memory.
        fill: int32 [b], memory rows that each stream has filled.
        memory: as `Stream.memory()` gives it, oldest row first, shorter streams zero-padded on the left.
        head: int32 [b], where each stream stood in its ring: no part of the function, but of its rounding.
        states: as `Stream.state()` gives them, where the model has no memory rows; None where it has.
    """

    model_id: str
    fill: Ids
    memory: dict[str, Floats]
    head: Ids | None = None
    states: dict[str, Array] | None = None

    @property
    def batch_size(self) -> int:
        """b, the number of streams."""
        return int(self.fill.shape[0])

    def save(self, path: str | Path) -> None:
        """Write a safetensors file; an existing one is replaced in one step.

        Raises:
            TxlError: the file cannot be written.
        """
        from safetensors.numpy import save

        target = Path(path)
        facts = {"format": FORMAT if self.states is None else WHOLE, "model_id": self.model_id}
        tensors = self.states
        if tensors is None:
            tensors = {"fill": self.fill, **({} if self.head is None else {"head": self.head}), **self.memory}
        else:
            facts["batch_size"] = str(self.batch_size)
        data = save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, metadata=facts)
        try:
            write_whole(target, data)
        except OSError as error:
            raise TxlError(f"{target}: the state cannot be written ({error}); choose another place") from None

    @classmethod
    def load(cls, path: str | Path) -> StreamState:
        """Read what `save` wrote.

        Raises:
            UsageError: the file is missing or is not a saved state.
        """
        from safetensors import SafetensorError, safe_open

        source = Path(path)
        if not source.is_file():
            raise UsageError(f"{source}: no such file, expected a saved state; StreamState.save writes one")
        try:
            with safe_open(source, framework="numpy") as stored:
                facts = stored.metadata() or {}
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError, TypeError, AttributeError, KeyError) as error:  # NumPy has no BF16, no F8
            raise UsageError(f"{source}: {error}; expected a saved state; StreamState.save writes one") from None
        model_id, batch_size = facts.get("model_id", ""), facts.get("batch_size", "")
        if facts.get("format") == WHOLE and re.fullmatch("[1-9][0-9]{0,5}", batch_size):
            return cls(model_id, np.zeros(int(batch_size), np.int32), {}, None, tensors)
        fill = tensors.pop("fill", None)
        if facts.get("format") != FORMAT or fill is None or fill.ndim != 1 or fill.dtype != np.int32:
            raise UsageError(f"{source}: another kind of file, expected a saved state ({FORMAT} or {WHOLE})")
        head = tensors.pop("head", None)
        if head is not None and (head.shape != fill.shape or head.dtype != np.int32):
            raise UsageError(
                f"{source}: its head is {head.dtype} {list(head.shape)}, expected int32 {list(fill.shape)}"
            )
        return cls(model_id, fill, tensors, head)


def check_fits(state: StreamState, manifest: Manifest, states: Sequence[StateTensor], batch_size: int) -> None:
    """Hold a snapshot against the stream that is to continue from it.

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
            f"the state belongs to model {state.model_id[:12] or 'unknown'}, this bundle is {manifest.model_id[:12]}; "
            "restore it in the model it was taken from"
        )
    fill, head = state.fill, state.head
    if not _counts(fill):
        raise UsageError(f"the state's fill is {_shown(fill)}, expected int32 [{batch_size}]; take it again")
    if state.batch_size != batch_size:
        raise UsageError(
            f"the state holds {state.batch_size} sequences, this stream has {batch_size}; "
            f"open it with model.stream({state.batch_size})"
        )
    if (state.states is None) != ("fill" in manifest.counters):
        held, kept = ("memory rows", "whole tensors") if state.states is None else ("whole tensors", "memory rows")
        raise UsageError(f"the state holds {held}, this model carries {kept}; restore a state of the same form")
    if state.states is not None:
        from txl_runtime.streaming.states import check_reached, check_states

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
                f"the state's {name} is {_shown(found)}, expected {expected}; "
                "restore a state of a bundle that keeps the same form of memory"
            )


def _counts(found: object) -> bool:
    return isinstance(found, np.ndarray) and found.ndim == 1 and np.issubdtype(found.dtype, np.integer)


def _shown(found: object) -> str:
    if isinstance(found, np.ndarray):
        return f"{found.dtype} {list(found.shape)}"
    return "absent" if found is None else type(found).__name__
