"""A stream's state from segment to segment: it is shown, reset, moved, stored and restored here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import StateTensor
from txl_runtime.errors import UsageError
from txl_runtime.streaming import states
from txl_runtime.streaming.checks import check_rows, few, is_whole, shown
from txl_runtime.streaming.loop import Closed, Loop
from txl_runtime.streaming.snapshot import StreamState
from txl_runtime.streaming.state import RowState
from txl_runtime.types import Array, Floats, Ids


class CarriedState:
    """A stream's operations on its state: show, reset, select, take, put, snapshot, restore.

    Attributes:
        loop: the engine's loop, for measurements and tests.
    """

    def __init__(self, manifest: Manifest, loop: Loop, update: str, batch_size: int) -> None:
        self._manifest, self.loop, self._b = manifest, loop, batch_size
        self._states, self._can = manifest.states_of(update), manifest.can
        self._replaced = 0  # number of resets, restores and the like: a running `generate` refuses to go on after one
        self._half_changed = False  # True after an interrupt while the state was being replaced

    def __repr__(self) -> str:
        if isinstance(self.loop, Closed):
            return f"<Stream of {self._b} sequences, closed>"
        rows = f", fill {self.fill.tolist()} of {self._manifest.memory_length}" if self._can.count_rows else ""
        return f"<Stream of {self._b} sequences{rows}>"

    @property
    def batch_size(self) -> int:
        """b, the number of sequences."""
        return self._b

    @property
    def fill(self) -> Ids:
        """The number of memory rows of each sequence, int32 [b], 0 … M; zeros if the model has no memory rows."""
        return self.loop.fill[: self._b].copy()

    def memory(self) -> dict[str, Floats]:
        """Return copies of the memory, one entry per layer and role, the oldest row first.

        Returns:
            "layers.00.hidden": float32 [b, rows, D], or "layers.00.key" and "layers.00.value": [b, rows, H, d_head];
            rows is the largest fill, shorter sequences are zero-padded on the left.

        Raises:
            UsageError: the model has no memory rows.
        """
        return dict(self.iter_memory())

    def iter_memory(self) -> Iterator[tuple[str, Floats]]:
        """Yield what `memory` returns, one tensor at a time: all together may be larger than the weights."""
        if not self._can.count_rows:
            names = ", ".join(state.name for state in self._states) or "nothing"
            raise UsageError(f"the model carries {names}, expected memory rows; use state() to see what it carries")
        yield from self._gathered([state for state in self._states if state.counted], int(self.fill.max(initial=0)))

    def state(self) -> dict[str, Array]:
        """Return copies of the state by the names and shapes of the bundle's table, e.g. {"hidden": [b, D]}.

        An absent tensor is left out. Memory is float32 with M rows, the oldest first; with fill 2 and M 4, rows 2 and 3
        exist.
        """
        self._ready()
        rolled = {state.name: state for state in self._manifest.states_of("rolled")}
        shown = [rolled.get(state.name, state) for state in self._states]
        return states.as_declared(dict(self._gathered(self._states, self._manifest.memory_length)), shown)

    def _gathered(self, table: Sequence[StateTensor], rows: int) -> Iterator[tuple[str, Array]]:
        """Yield tensors of all sequences by name, copied out of the loop one by one if that costs no more."""
        for group in [[state] for state in table] if self.loop.piecewise else [table]:
            parts = (self.loop.take(row, [state.name for state in group]) for row in range(self._b))
            yield from states.gathered(parts, group, self._b, rows).items()

    def take(self, row: int) -> states.TakenState:
        """Return a copy of one sequence's state, to `put` into a stream of the same model, or to save.

        Raises:
            UsageError: `row` is no sequence, or it has no state of its own because the model runs in lockstep.
        """
        self._ready()
        found = self.loop.take(self._alone(row, "take"))
        return states.TakenState(found.fill, found.head, found.tensors, self._manifest, self._states)

    def put(self, row: int, state: RowState | StreamState) -> None:
        """Let one sequence continue from a state that `take` returned, or from a `StreamState` of one sequence.

        The state is checked before anything is changed.

        Raises:
            UsageError: as `take`, or the state does not fit the model.
        """
        self._ready()
        which = self._alone(row, "put")
        found = states.checked_row(state, self._manifest, self._states)
        with self._changing():
            self.loop.clear(np.array([which]) if self._can.run_apart else np.arange(self._manifest.batch_size))
            self.loop.put(which, found)

    def reset(self, rows: ArrayLike | None = None) -> None:
        """Set sequences to their first state: all, or those in `rows`, indices or bools: [1] or [False, True].

        Raises:
            UsageError: an index is no sequence, or the model runs in lockstep and `rows` are only some of them.
        """
        which = np.arange(self._manifest.batch_size)
        if rows is not None:
            self._ready()
            named = check_rows(rows, self._b)
            if not self._can.run_apart and 0 < len(set(named.tolist())) < self._b:
                raise UsageError(
                    f"reset names sequences {few(named)}, expected all {self._b} or none, because this model's "
                    "sequences run in lockstep; call reset(), or open a stream for each"
                )
            if self._can.run_apart or not len(named):
                which = named
        with self._changing():
            self.loop.clear(which)

    def select(self, rows: ArrayLike) -> None:
        """Make sequence i continue sequence rows[i]: reorder, drop or duplicate, as beam search needs.

        The stream then has len(rows) sequences, at most B: with rows [2, 2], two copies of sequence 2.
        """
        self._ready()
        which = check_rows(rows, self._b)
        if not 1 <= len(which) <= self._manifest.batch_size:
            raise UsageError(f"rows name {len(which)} sequences, expected 1 … {self._manifest.batch_size}")
        if not self._can.run_fewer and len(which) < self._manifest.batch_size:
            raise UsageError(
                f"rows name {len(which)} sequences, expected {self._manifest.batch_size}, because this model's "
                "sequences influence one another"
            )
        self.loop.prepare_reorder(which)
        with self._changing():
            self.loop.reorder(which)
            self._b = len(which)

    def snapshot(self) -> StreamState:
        """Return a copy of the state of all sequences, to go back to or to save."""
        heads, fill = self._ready().heads[: self._b], self.fill
        tensors = dict(self._gathered(self._states, int(fill.max(initial=0))))
        return states.snapshot_of(tensors, fill, heads, self._manifest, self._states)

    def restore(self, state: StreamState) -> None:
        """Continue from a snapshot, bit for bit as if nothing had happened since.

        Everything is checked before anything is changed.

        Raises:
            UsageError: the snapshot has a different model, form of state or number of sequences.
        """
        states.check_fits(state, self._manifest, self._states, self._b)
        with self._changing():
            self.loop.clear(np.arange(self._manifest.batch_size))
            for row, part in enumerate(states.parted(state, self._states)):
                self.loop.put(row, part)

    def _alone(self, row: int, what: str) -> int:
        """Return the index of a sequence, after checking that it exists and has a state of its own."""
        if not is_whole(row):
            raise UsageError(f"{what} names sequence {shown(row)}, expected a whole number of 0 … {self._b - 1}")
        (which,) = check_rows([row], self._b).tolist()
        if not self._can.run_apart and self._b > 1:
            raise UsageError(
                f"{what} names one of {self._b} sequences, expected a stream of one, because this model's sequences "
                "run in lockstep; use snapshot() and restore(...) for all of them"
            )
        return int(which)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Mark the state as half replaced while the caller replaces it, so that an interrupt in between is noticed."""
        self._replaced += 1
        self._half_changed = True
        yield
        self._half_changed = False

    def _ready(self) -> Loop:
        """Return the loop.

        Raises:
            UsageError: an interrupt left its state half replaced.
        """
        if self._half_changed and not isinstance(self.loop, Closed):  # a closed model has its own, clearer message
            raise UsageError(
                "the stream's memory was left half replaced when a reset, select or restore was interrupted, expected "
                "whole memory; call reset() or restore(...)"
            )
        return self.loop
