"""Operations on the state that a stream carries from segment to segment: show, reset, reorder, store and restore it."""

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
        half_changed: True after an interrupt while the state was replaced, or a failure while a draft was kept.
    """

    def __init__(self, manifest: Manifest, loop: Loop, update: str, batch_size: int) -> None:
        self._manifest, self.loop, self._b = manifest, loop, batch_size
        self._states, self._can = manifest.states_of(update), manifest.can
        self._replaced = 0  # number of resets, restores and so on; a running `generate` raises an error when it changes
        # number of selects; a `generate` whose prompt is not yet fed raises an error when it changes
        self._selected = 0
        self.half_changed = False

    def __repr__(self) -> str:
        if isinstance(self.loop, Closed):
            return f"<Stream of {self._b} sequences, closed>"
        rows = f", fill {self.fill.tolist()} of {self._manifest.memory_length}" if self._can.count_rows else ""
        return f"<Stream of {self._b} sequences{rows}>"

    @property
    def batch_size(self) -> int:
        """The number of sequences, b."""
        return self._b

    @property
    def fill(self) -> Ids:
        """The number of memory rows of each sequence, int32 [b], 0 … memory_length; zeros if the model has no memory
        rows.

        For example, [16, 3] after sequence 1 was reset.
        """
        self._settle()
        return self.loop.fill[: self._b].copy()

    def memory(self) -> dict[str, Floats]:
        """Return copies of the memory, one entry per layer and role, the oldest row first.

        Returns:
            "layers.00.hidden": float32 [b, rows, D], or "layers.00.key" and "layers.00.value": [b, rows, H, d_head];
            rows is the largest fill, shorter sequences are zero-padded on the left.

        Raises:
            UsageError: the model has no memory rows.

        Example:
            >>> stream = txl_runtime.load("samples/tiny.txl").stream()
            >>> found = stream.feed("Three")
            >>> stream.memory()["layers.00.key"].shape
            (1, 5, 4, 24)
        """
        return dict(self.iter_memory())

    def iter_memory(self) -> Iterator[tuple[str, Floats]]:
        """Yield the tensors of `memory` one at a time, because all of them together may be larger than the weights.

        For example, ("layers.00.hidden", [2, 16, 32]).
        """
        if not self._can.count_rows:
            names = ", ".join(state.name for state in self._states) or "nothing"
            raise UsageError(f"the model carries {names}, expected memory rows; use state() to see what it carries")
        yield from self._gathered([state for state in self._states if state.counted], int(self.fill.max(initial=0)))

    def state(self) -> dict[str, Array]:
        """Return copies of the state by the names and shapes of the bundle's table, e.g. {"hidden": [b, D]}.

        A tensor that does not exist yet is left out. Memory is float32 with all M rows, the oldest first. If fill is 2
        and M 4, rows 2 and 3 hold data, and rows 0 and 1 are zeros.

        Example:
            >>> stream = txl_runtime.load("samples/tiny.txl").stream()
            >>> stream.state()["layers.00.key"].shape
            (1, 4, 64, 24)
        """
        self._ready()
        rolled = {state.name: state for state in self._manifest.states_of("rolled")}
        shown = [rolled.get(state.name, state) for state in self._states]
        return states.as_declared(dict(self._gathered(self._states, self._manifest.memory_length)), shown)

    def _gathered(self, table: Sequence[StateTensor], rows: int) -> Iterator[tuple[str, Array]]:
        """Yield the tensors of all sequences by name; one tensor at a time where the loop can copy single tensors
        cheaply.
        """
        for group in [[state] for state in table] if self.loop.piecewise else [table]:
            parts = (self.loop.take(row, [state.name for state in group]) for row in range(self._b))
            yield from states.gathered(parts, group, self._b, rows).items()

    def take(self, row: int) -> states.TakenState:
        """Return a copy of one sequence's state, to `put` into a stream of the same model, or to save.

        Raises:
            UsageError: there is no sequence `row`, or it has no separate state because all sequences run in lockstep.

        Example:
            >>> one, other = (txl_runtime.load("samples/tiny.txl").stream() for _ in range(2))
            >>> found = one.feed("The ")
            >>> other.put(0, one.take(0))
            >>> np.array_equal(one.step("l"), other.step("l"))
            True
        """
        self._ready()
        state = self.loop.take(self._alone(row, "take"))
        return states.TakenState(state.fill, state.head, state.tensors, self._manifest, self._states)

    def put(self, row: int, state: RowState | StreamState) -> None:
        """Let one sequence continue from a state that `take` returned, or from a `StreamState` of one sequence.

        The state is checked before anything is changed.

        Raises:
            UsageError: the same cases as in `take`, or the state does not fit the model.
        """
        self._ready()
        which = self._alone(row, "put")
        rows = states.checked_row(state, self._manifest, self._states)
        with self._changing():
            self.loop.clear(np.array([which]) if self._can.run_apart else np.arange(self._manifest.batch_size))
            self.loop.put(which, rows)

    def reset(self, rows: ArrayLike | None = None) -> None:
        """Set sequences to their first state: all of them, or only those that `rows` names, e.g. [1] or [False, True].

        Raises:
            UsageError: an index is out of range, or `rows` name only some sequences of a model that runs in lockstep.
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

        The stream then has len(rows) sequences, at most the bundle's batch size. Rows [2, 2] make two copies of
        sequence 2.

        Example:
            >>> stream = txl_runtime.load("samples/tiny.txl").stream()
            >>> stream.select([0])
            >>> stream.batch_size
            1
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
            self._selected += 1

    def snapshot(self) -> StreamState:
        """Return a copy of the state of all sequences, to go back to or to save.

        Example:
            >>> stream = txl_runtime.load("samples/tiny.txl").stream()
            >>> first = stream.snapshot()
            >>> one = stream.step("T")
            >>> stream.restore(first)
            >>> np.array_equal(stream.step("T"), one)
            True
        """
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
        """Return the index of a sequence, after checking that it exists and has a separate state."""
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
        """Mark the state as half replaced while the `with` block runs, so that later calls notice an interrupt inside
        it.
        """
        self._replaced += 1
        self.half_changed = True
        yield
        self.half_changed = False

    def _settle(self) -> None:
        """Commit the tokens that a running `generate` has yielded, before a caller reads or changes the state."""

    def _ready(self) -> Loop:
        """Return the loop, after committing all yielded tokens; raise the UsageError of `_whole`."""
        self._settle()
        return self._whole()

    def _whole(self) -> Loop:
        """Return the loop, after checking that its state is whole.

        Raises:
            UsageError: an interrupt left the loop's state half replaced.
        """
        if self.half_changed and not isinstance(self.loop, Closed):  # `Closed` raises the clearer message
            raise UsageError(
                "the stream's memory was left half replaced when a reset, select, restore or draft was interrupted, "
                "expected whole memory; call reset() or restore(...)"
            )
        return self.loop
