"""The state that a stream carries from segment to segment: shown, reset, moved, stored and restored."""

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
    """What a stream does with its state, apart from running segments.

    Attributes:
        loop: what it runs on, for whoever measures or tests an engine.
    """

    def __init__(self, manifest: Manifest, loop: Loop, update: str, batch_size: int) -> None:
        self._manifest, self.loop, self._b = manifest, loop, batch_size
        self._states, self._can = manifest.states_of(update), manifest.can
        self._replaced = 0  # how often the state was replaced from outside: a running `generate` must not go on then
        self._half_changed = False  # an interrupt came while the state was being replaced

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
        """Memory rows that exist, int32 [b], 0 … M each; zeros where the model has no memory rows."""
        return self.loop.fill[: self._b].copy()

    def memory(self) -> dict[str, Floats]:
        """The memory, one entry per layer and role: copies, unscaled, oldest row first.

        Returns:
            "layers.00.hidden": float32 [b, rows, D], or "layers.00.key" and "layers.00.value": [b, rows, H, d_head];
            rows is the largest fill, shorter sequences are zero-padded on the left.

        Raises:
            UsageError: the model has no memory rows.
        """
        return dict(self.iter_memory())

    def iter_memory(self) -> Iterator[tuple[str, Floats]]:
        """As `memory`, name and rows of one tensor at a time: all together can be larger than the weights."""
        if not self._can.count_rows:
            names = ", ".join(state.name for state in self._states) or "nothing"
            raise UsageError(f"the model carries {names}, expected memory rows; use state() to see what it carries")
        yield from self._gathered([state for state in self._states if state.counted], int(self.fill.max(initial=0)))

    def state(self) -> dict[str, Array]:
        """The state by the names and shapes of the bundle's table, with b sequences: copies.

        A tensor that is absent is left out. Memory rows are float32, M of them, the oldest first and those that exist
        last.
        """
        self._ready()
        rolled = {state.name: state for state in self._manifest.states_of("rolled")}
        shown = [rolled.get(state.name, state) for state in self._states]
        return states.as_declared(dict(self._gathered(self._states, self._manifest.memory_length)), shown)

    def _gathered(self, table: Sequence[StateTensor], rows: int) -> Iterator[tuple[str, Array]]:
        """Tensors of all sequences by name, each copied out by itself where that costs no more."""
        for group in [[state] for state in table] if self.loop.piecewise else [table]:
            parts = (self.loop.take(row, [state.name for state in group]) for row in range(self._b))
            yield from states.gathered(parts, group, self._b, rows).items()

    def take(self, row: int) -> states.TakenState:
        """A copy of one sequence's state, to `put` into a stream of the same model, or to save.

        Raises:
            UsageError: there is no such sequence, or it has no state of its own because the model runs in lockstep.
        """
        self._ready()
        found = self.loop.take(self._alone(row, "take"))
        return states.TakenState(found.fill, found.head, found.tensors, self._manifest, self._states)

    def put(self, row: int, state: RowState | StreamState) -> None:
        """Let one sequence continue from a state that was taken, or from a saved one of one sequence.

        It is checked before anything is changed.

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
        """Forget everything, in all sequences or in those named: indices, or one bool per sequence.

        Raises:
            UsageError: no such sequences, or some of them alone where the model runs in lockstep.
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
        """Make sequence i continue what sequence rows[i] was: reorder, drop or duplicate, as beam search needs.

        Afterwards the stream has len(rows) sequences, at most the bundle's batch size.
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
        """A copy of the state, to go back to or to save."""
        heads, fill = self._ready().heads[: self._b], self.fill
        tensors = dict(self._gathered(self._states, int(fill.max(initial=0))))
        return states.snapshot_of(tensors, fill, heads, self._manifest, self._states)

    def restore(self, state: StreamState) -> None:
        """Continue from a snapshot, bit for bit as if nothing had happened since.

        Everything is checked before anything is changed.

        Raises:
            UsageError: the snapshot is of another model, form of state or number of sequences.
        """
        states.check_fits(state, self._manifest, self._states, self._b)
        with self._changing():
            self.loop.clear(np.arange(self._manifest.batch_size))
            for row, part in enumerate(states.parted(state, self._states)):
                self.loop.put(row, part)

    def _alone(self, row: int, what: str) -> int:
        """The index of a sequence that has a state of its own."""
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
        """Replace state from outside; what interrupts this in the middle is remembered until all of it is replaced."""
        self._replaced += 1
        self._half_changed = True
        yield
        self._half_changed = False

    def _ready(self) -> Loop:
        """The loop, unless its state was left half replaced.

        Raises:
            UsageError: it was.
        """
        if self._half_changed and not isinstance(self.loop, Closed):  # that says more itself
            raise UsageError(
                "the stream's memory was left half replaced when a reset, select or restore was interrupted, expected "
                "whole memory; call reset() or restore(...)"
            )
        return self.loop
