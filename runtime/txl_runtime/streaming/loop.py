"""The protocol `Loop`, which an engine implements so that streams run on it.

A loop holds the state of a batch of B sequences, and runs one segment for all of them at a time. `host` implements it
with NumPy arrays, `device` with memory that stays on a GPU. A stream calls an engine only through its loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NoReturn, Protocol

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Program, StateTensor
from txl_runtime.errors import UsageError
from txl_runtime.streaming.outputs import StreamSoftmax
from txl_runtime.streaming.partial import Parts
from txl_runtime.streaming.programs import Want
from txl_runtime.streaming.state import Initial, Placement, RowState, SequenceCounters
from txl_runtime.types import Array, Floats, Ids, Indices

if TYPE_CHECKING:
    from txl_runtime.streaming.best_words import BestWords


class Result(Protocol):
    """The result of one segment, valid until the loop's next run; it may stay on a device until it is read."""

    def rows(self) -> Floats:
        """Return the program's feature rows for every position, [b, T, F], which `Loop.output` reads.

        With T 5 and F 64, two sequences have [2, 5, 64].
        """

    def last(self) -> Floats:
        """Return the feature row at each sequence's last counted position, [b, F]; for an idle sequence, its first row.

        For example, counts [5, 3] give the rows at positions 4 and 2.
        """

    def parts(self) -> BestWords | None:
        """Return the best words after each sequence's last position, if the result was asked for with "next"; None if
        no program computes them.
        """

    def nll(self) -> Floats:
        """Return negative log-likelihoods in nats, [b, T], of the tokens in the input "targets".

        For example, [[2.3, 0.1, 4.0]].
        """

    def outputs(self) -> dict[str, Array]:
        """Return copies of all outputs in the shapes of the output table, e.g. [b, T, F]; zero beyond each sequence's
        count.

        With counts [5, 3], positions 3 and 4 of sequence 1 are zero.
        """


class Loop(Protocol):
    """The state of a batch of B sequences, and the programs that advance it.

    Attributes:
        output: the softmax, which turns rows of features into log-probabilities.
        piecewise: whether copying the state's tensors one by one costs no more than copying all at once.
        leading: whether a step computes only the sequences up to the last sequence that runs.
        parts: the rules for committing only a part of a segment.
    """

    output: StreamSoftmax
    piecewise: bool
    leading: bool
    parts: Parts

    @property
    def fill(self) -> Ids:
        """The number of memory rows of each sequence, int32 [B]. For example, [16, 3]."""

    @property
    def heads(self) -> Ids:
        """The ring slot of each sequence's next row, [B]; zeros without a ring. Rounding depends on the slot.

        For example, [7, 3] in rings of 16 slots.
        """

    def run(self, inputs: Mapping[str, Array], counts: Ids, want: Want = "rows", commit: bool = True) -> Result:
        """Run one segment in the smallest program that holds it. With all counts 0 nothing runs.

        The new state is committed in one assignment. So an interrupt leaves either the state before the segment or the
        state after it.

        Args:
            inputs: checked arrays by name. "B" and "L" of the input table are b and T (plus look-ahead); padding is
                zero. "targets", int32 [b, T], and "temperature", float32 [b], may be given even if no program reads
                them. Without `commit` the loop keeps the arrays, not copies, for a later `commit`.
            counts: int32 [b], number of positions that count in each sequence; 0 leaves a sequence idle.
            want: the method of the result that the caller will use.
            commit: whether the segment becomes part of the state; if not, a later `commit` can still add it.

        Raises:
            BackendError: the engine failed; the state is unchanged.
        """

    def commit(self, counts: Ids | None = None) -> None:
        """Make the latest segment, or its first positions, part of the state, in one assignment.

        Nothing happens if the segment was committed already, if all sequences were idle, or after a clear, reorder or
        put. To commit a part, a ring advances by fewer rows. A state that steps replace as a whole makes the part run
        again from the state before the segment, which invalidates the segment's result. `parts.refusal` says which
        parts a model does not allow. For example, counts [3, 0] keep 3 positions of sequence 0.

        Args:
            counts: int32 [b], number of positions to keep of each sequence, 0 … the number that ran; all 0 drop the
                segment. None keeps all that ran.

        Raises:
            UsageError: a count is larger than the positions that ran, or the model does not allow this part; the
                segment can still be committed.
            BackendError: the engine failed while the part ran again; the state before the segment stays.
        """
        return

    def written(self) -> Iterable[tuple[StateTensor, Array]]:
        """Return the "replace" states, [.., B, ..], that an uncommitted segment returned.

        Idle sequences behind the last running one are not computed, so their entries may be from an earlier segment.
        For example, state "h" as [2, 32].
        """
        return ()

    def clear(self, rows: Indices) -> None:
        """Set sequences to their first state. For example, `clear([1, 3])`."""

    def limit(self, rows: Indices, most: int) -> None:
        """Limit the number of memory rows that these sequences keep; after a reorder the limit still belongs to the
        same index.

        For example, `limit([0], 4)` keeps the newest 4 rows of sequence 0.
        """
        return

    def prepare_reorder(self, rows: Indices) -> None:
        """Allocate the memory that `reorder` needs for these rows, or raise `BackendError`; the state is unchanged.

        For example, `prepare_reorder([1, 1, 0])`.
        """
        return

    def reorder(self, rows: Indices) -> None:
        """Give sequence i the former state of sequence rows[i], and clear sequences len(rows) … B - 1.

        For example, [1, 1] copies sequence 1 to sequence 0 too.
        """

    def take(self, row: int, names: Collection[str] | None = None) -> RowState:
        """Return a copy of one sequence's state, with all its tensors or only the tensors in `names`."""

    def put(self, row: int, state: RowState) -> None:
        """Set a cleared sequence to a state that `take` returned."""


class LoopState(Loop):
    """The half of a loop that is the same for all engines: clearing, reordering, copying out and setting sequences.

    Args:
        lock: a lock that is held while states are changed or read.

    Attributes:
        counters: fill, ring head and side (which of two sets of tensors) of every sequence.
        placements: the states' arrays, which the subclass opens.
        counts: the counters that programs read, by the names of their inputs.
    """

    placements: tuple[Placement, ...]
    turning = False
    """True if a reorder copies the states into the second of two sets of tensors."""

    def __init__(self, manifest: Manifest, states: Sequence[StateTensor], lock: AbstractContextManager[object]) -> None:
        self.counters = counters = SequenceCounters(manifest, states)
        views = {"valid": counters.valid, "fill": counters.fill}
        if counters.ring is not None:
            views["head"] = counters.head
        self.counts: Mapping[str, Ids] = {
            entry.name: view for role, view in views.items() for entry in manifest.inputs if entry.role == role
        }
        self._batch, self._together = manifest.batch_size, manifest.streams == "lockstep"
        self.parts = Parts(manifest, states)
        self._lock, self._computed = lock, 0
        self._tried: tuple[Mapping[str, Array], int] = {}, 0  # inputs and batch size of the latest uncommitted segment
        self._counted: tuple[Ids | None, int] = None, 0

    @property
    def fill(self) -> Ids:
        return self.counters.fill

    @property
    def heads(self) -> Ids:
        heads: Ids = self.counters.head.copy()
        return heads

    def count(self, counts: Ids) -> int:
        """Set the number of positions that count, int32 [b], and return the number of sequences to compute.

        The sequences up to the last sequence that is not idle are computed: 2 for counts [0, 3, 0], 0 if all are idle.
        """
        self._computed = 0  # set to 0, so that after a failure `commit` finds no segment
        counted, rows = self._counted
        if counts is counted:
            return rows
        self._counted = None, 0
        values, valid = counts.tolist(), self.counters.valid
        b = rows = len(values)
        while rows and not values[rows - 1]:
            rows -= 1
        if b < self._batch:
            valid[b:] = max(values) if self._together else 0
            valid = valid[:b]
        valid[...] = counts
        # an array that `inputs.Segments` has checked never changes, so it is read only once
        if counts.base is None and not counts.flags.writeable:
            self._counted = counts, rows
        return rows

    def commit(self, counts: Ids | None = None) -> None:
        computed = self._computed if counts is None else self._accept(counts)
        self._computed = 0  # set to 0 before the commit, so that an interrupted commit is not repeated
        if computed:
            with self._lock:
                self.counters.advance(computed, self._spill)

    def _accept(self, counts: Ids) -> int:
        """Set the positions to commit; return the number of sequences to commit, 0 if the part has run again."""
        computed, (inputs, b) = self._computed, self._tried
        if not computed:
            return 0
        positions, ran = counts.tolist(), self.counters.valid[:b].tolist()
        self.parts.check(positions, ran)
        if positions == ran or not any(positions):
            return computed if any(positions) else 0
        if self.parts.again:
            self.run(self.parts.inputs(inputs, counts), counts)
            return 0
        self.count(counts)
        return computed

    def written(self) -> Iterable[tuple[StateTensor, Array]]:
        if not self._computed:
            return ()
        with self._lock:
            return [pair for placement in self.placements for pair in placement.written(1 - self.counters.side)]

    def limit(self, rows: Indices, most: int) -> None:
        self.counters.most[rows] = most  # this needs no lock: counters lie on the host in every loop
        np.minimum(self.fill, self.counters.most, out=self.fill)

    def clear(self, rows: Indices) -> None:
        self._computed = 0  # an uncommitted segment started from the state that is now cleared
        with self._lock:
            for placement in self.placements:
                placement.clear(rows)
            self.counters.clear(rows)

    def prepare_reorder(self, rows: Indices) -> None:
        for placement in self.placements:
            placement.prepare_reorder(rows)

    def reorder(self, rows: Indices) -> None:
        side, self._computed = self.counters.side ^ self.turning, 0
        with self._lock:
            for placement in self.placements:
                placement.reorder(rows, side)
            self.counters.reorder(rows, side)

    def take(self, row: int, names: Collection[str] | None = None) -> RowState:
        fill, head = int(self.counters.fill[row]), int(self.counters.head[row])
        tensors: dict[str, Array] = {}
        with self._lock:
            for placement in self.placements:
                tensors |= placement.take(row, fill, names)
        return RowState(fill, head, tensors)

    def put(self, row: int, state: RowState) -> None:
        self._computed = 0
        with self._lock:
            self.counters.put(row, state.fill, state.head)
            for placement in self.placements:
                placement.put(row, state.tensors)

    def _spill(self, row: int, count: int) -> None:
        for placement in self.placements:
            placement.spill(row, count)


class Closed:
    """A placeholder for objects of a closed model: using any attribute raises UsageError."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # repr, copy and pickle look these up and expect AttributeError
            raise AttributeError(name)
        self.refuse()

    def refuse(self) -> NoReturn:
        """Raise the UsageError of a closed model."""
        raise UsageError("the model was closed, expected it open; load it again")


class Backend(Protocol):
    """An engine that has opened a bundle's programs.

    Attributes:
        name, description: the engine's name for programs, and a text for people.
        update: the update rule of its programs, e.g. "ring".
        programs: the programs that it runs.
        reached: largest differences of (log-probabilities, memory) from the self-test's vectors that were measured when
            the engine was built, as limits of the self-test; None for the bundle's limits.
        precision: the precision to which the engine rounds, e.g. keys and values, if it is lower than the bundle's.
    """

    name: str
    description: str
    update: str
    programs: tuple[Program, ...]
    reached: tuple[float, float] | None = None
    precision: str | None = None

    def fitting(self, manifest: Manifest, sequences: int) -> Manifest:
        """Return the manifest with which to open a stream of `sequences`: this one, or one of a smaller batch size."""
        return manifest

    def open_loop(self, manifest: Manifest, initial: Initial) -> Loop:
        """Return a loop whose sequences are in their first state.

        Args:
            manifest: manifest of the bundle, or the manifest that `fitting` returned.
            initial: first values of the states, from `initial_values`.
        """

    def release_pages(self) -> None:
        """Release memory-mapped pages of the weight file; the system reads them again when they are needed."""
