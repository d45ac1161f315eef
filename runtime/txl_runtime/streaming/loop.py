"""The loop: what an engine implements so that streams run on it.

A loop holds the state of B sequences and runs one segment of all of them at a time. `host` implements it with arrays of
NumPy, `device` with memory that never leaves a GPU. A stream calls nothing else of an engine.
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
from txl_runtime.streaming.programs import Want
from txl_runtime.streaming.state import Initial, Placement, RowState, SequenceCounters
from txl_runtime.types import Array, Floats, Ids, Indices

if TYPE_CHECKING:
    from txl_runtime.streaming.best_words import BestWords


class Result(Protocol):
    """What one segment gave. It is good until the loop's next run, and may stay on a device until it is asked for."""

    def rows(self) -> Floats:
        """What the program returned for every position, [b, T, F]: what `Loop.output` takes."""

    def last(self) -> Floats:
        """The same for the last position that counts in each sequence, [b, F]; of an idle sequence, for its first."""

    def parts(self) -> BestWords | None:
        """What a draw after the last positions mostly needs of them, where a program returned that; for want "next"."""

    def nll(self) -> Floats:
        """Negative log-likelihoods in nats of the targets that were among the inputs, [b, T]."""

    def outputs(self) -> dict[str, Array]:
        """Copies of all outputs as the output table declares them, with b and T; zero where nothing counts."""


class Loop(Protocol):
    """The state of B sequences, and programs that advance it.

    Attributes:
        output: what turns rows of features into log-probabilities.
        piecewise: whether taking the state's tensors out one by one costs no more than taking all at once.
        leading: whether sequences behind the last one that runs are not computed.
    """

    output: StreamSoftmax
    piecewise: bool
    leading: bool

    @property
    def fill(self) -> Ids:
        """Memory rows that exist, [B]."""

    @property
    def heads(self) -> Ids:
        """Where each sequence stands in a ring, [B]: rounding depends on it, so a snapshot keeps it. Else zeros."""

    def run(self, inputs: Mapping[str, Array], counts: Ids, want: Want = "rows", commit: bool = True) -> Result:
        """Run one segment in the smallest program that holds it. One in which nothing counts does nothing.

        The state after it is committed in one assignment: whatever interrupts this call, the state is the one before
        the segment or the one after it.

        Args:
            inputs: by the programs' names, with b and T for "B" and "L" of the input table (and look-ahead); checked,
                with zeros in the padding. "targets" [b, T] may be among them whether or not a program reads them, and
                so may "temperature", float32 [b].
            counts: int32 [b], the positions that count; 0 leaves a sequence idle.
            want: what the result will be asked for.
            commit: whether the segment becomes part of the state; if not, `commit` may still make it so.

        Raises:
            BackendError: the engine failed; the state is what it was.
        """

    def commit(self) -> None:
        """Make the segment that ran last part of the state, in one assignment.

        Nothing happens if it is part of it, if all was idle, or if sequences were cleared, moved or put in since.
        """
        return

    def written(self) -> Iterable[tuple[StateTensor, Array]]:
        """Of a segment that was run but is not committed, the states it returned whole, [.., B, ..]; no memory rows.

        The entries of idle sequences may be old ones: a segment is computed up to the last sequence that is not idle.
        """
        return ()

    def clear(self, rows: Indices) -> None:
        """Make sequences what they are before anything was seen."""

    def limit(self, rows: Indices, most: int) -> None:
        """Limit how many memory rows the sequences in these places keep and see; the limit belongs to the place."""
        return

    def prepare_reorder(self, rows: Indices) -> None:
        """Make the room that `reorder` needs for these rows, or raise `BackendError`: nothing is changed yet."""
        return

    def reorder(self, rows: Indices) -> None:
        """Make sequence i what sequence rows[i] was; those behind the last are cleared."""

    def take(self, row: int, names: Collection[str] | None = None) -> RowState:
        """A copy of one sequence's state: of all its tensors, or of those named."""

    def put(self, row: int, state: RowState) -> None:
        """Give a cleared sequence a state that was taken."""


class LoopState(Loop):
    """The half of a loop that does not depend on its engine: sequences are cleared, reordered, taken out and put back.

    Args:
        lock: held while states are changed or read.

    Attributes:
        counters: how far sequences have come.
        placements: the states; the subclass opens them.
        counts: what programs read of the counters, by the names of their inputs.
    """

    placements: tuple[Placement, ...]
    turning = False
    """Whether a reordering leaves the states on the other side."""

    def __init__(self, manifest: Manifest, states: Sequence[StateTensor], lock: AbstractContextManager[object]) -> None:
        self.counters = counters = SequenceCounters(manifest, states)
        views = {"valid": counters.valid, "fill": counters.fill}
        if counters.ring is not None:
            views["head"] = counters.head
        self.counts: Mapping[str, Ids] = {
            entry.name: view for role, view in views.items() for entry in manifest.inputs if entry.role == role
        }
        self._batch, self._together = manifest.batch_size, manifest.streams == "lockstep"
        self._lock, self._computed = lock, 0
        self._counted: tuple[Ids | None, int] = None, 0

    @property
    def fill(self) -> Ids:
        return self.counters.fill

    @property
    def heads(self) -> Ids:
        heads: Ids = self.counters.head.copy()
        return heads

    def count(self, counts: Ids) -> int:
        """Set the positions that count in a segment, int32 [b], and return how many sequences it has to be run for.

        These are the first ones, up to the last that is not idle; 0 where all are.
        """
        self._computed = 0  # until the segment has run, there is nothing to commit
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
        if counts.base is None and not counts.flags.writeable:  # what cannot change need not be read again
            self._counted = counts, rows
        return rows

    def commit(self) -> None:
        computed, self._computed = self._computed, 0  # first, so that an interrupt cannot lead to a second time
        if computed:
            self.counters.advance(computed, self._spill)

    def written(self) -> Iterable[tuple[StateTensor, Array]]:
        if not self._computed:
            return ()
        with self._lock:
            return [pair for placement in self.placements for pair in placement.written(1 - self.counters.side)]

    def limit(self, rows: Indices, most: int) -> None:
        self.counters.most[rows] = most  # the counters lie on the host whatever the loop, so no lock is taken
        np.minimum(self.fill, self.counters.most, out=self.fill)

    def clear(self, rows: Indices) -> None:
        self._computed = 0  # what ran before began from another state
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
        taken: dict[str, Array] = {}
        with self._lock:
            for placement in self.placements:
                taken |= placement.take(row, fill, names)
        return RowState(fill, head, taken)

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
    """What stands in place of what a model has given back: whatever is asked of it is refused."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python itself looks for, to show it or to copy it
            raise AttributeError(name)
        self.refuse()

    def refuse(self) -> NoReturn:
        """Raise UsageError."""
        raise UsageError("the model was closed, expected it open; load it again")


class Backend(Protocol):
    """An engine that has opened a bundle's programs.

    Attributes:
        name, description: of the engine, for programs and for people.
        update: the update rule of its programs.
        programs: those that it runs.
    """

    name: str
    description: str
    update: str
    programs: tuple[Program, ...]

    def fitting(self, manifest: Manifest, sequences: int) -> Manifest:
        """What a stream of so many sequences is opened with: the manifest, or as if it were of a smaller B."""
        return manifest

    def open_loop(self, manifest: Manifest, initial: Initial) -> Loop:
        """A loop of fresh sequences.

        Args:
            manifest: of the bundle that was opened.
            initial: what states are before anything was seen, from `initial_values`.
        """

    def release_pages(self) -> None:
        """Let go of pages of the weight file that are mapped into memory; they come back as they are needed."""
