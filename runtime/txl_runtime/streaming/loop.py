"""The loop, the protocol that an engine implements so that streams run on it.

A loop holds the state of B sequences and runs one segment of all of them at a time. `host` implements it with NumPy's
arrays, `device` with memory that never leaves a GPU. A stream calls nothing else of an engine.
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
    """The result of one segment. It is valid until the loop's next run, and may stay on a device until it is read."""

    def rows(self) -> Floats:
        """Return the program's rows for every position, [b, T, F], which `Loop.output` reads."""

    def last(self) -> Floats:
        """Return the row of each sequence's last counted position, [b, F]; of an idle sequence, its first row."""

    def parts(self) -> BestWords | None:
        """Return the best words after the last positions, for want "next"; None if no program returned them."""

    def nll(self) -> Floats:
        """Return negative log-likelihoods in nats, [b, T], of the "targets" among the inputs."""

    def outputs(self) -> dict[str, Array]:
        """Return copies of all outputs in the table's shapes, e.g. [b, T, F]; zero beyond each sequence's count."""


class Loop(Protocol):
    """The state of B sequences, and programs that advance it.

    Attributes:
        output: the softmax, which turns rows of features into log-probabilities.
        piecewise: whether taking the state's tensors out one by one costs no more than taking all at once.
        leading: whether a step computes only the first sequences, up to the last that runs.
        parts: the parts of a segment that `commit` takes.
    """

    output: StreamSoftmax
    piecewise: bool
    leading: bool
    parts: Parts

    @property
    def fill(self) -> Ids:
        """The number of memory rows of each sequence, int32 [B]."""

    @property
    def heads(self) -> Ids:
        """The slot of each sequence's next row in a ring, [B]; zeros without one. Rounding depends on it."""

    def run(self, inputs: Mapping[str, Array], counts: Ids, want: Want = "rows", commit: bool = True) -> Result:
        """Run one segment in the smallest program that holds it. With all counts 0 nothing runs.

        The state after it is committed in one assignment: an interrupt leaves the state before the segment or the one
        after it.

        Args:
            inputs: checked arrays by name, with b and T for "B" and "L" of the input table (plus look-ahead), and zeros
                in the padding. "targets", int32 [b, T], and "temperature", float32 [b], may be among them even if no
                program reads them. Without `commit` the loop keeps the arrays, not copies, for a later `commit`.
            counts: int32 [b], the positions that count; 0 leaves a sequence idle.
            want: the method of the result that the caller will use.
            commit: whether the segment becomes part of the state; if not, a later `commit` can still make it so.

        Raises:
            BackendError: the engine failed; the state is unchanged.
        """

    def commit(self, counts: Ids | None = None) -> None:
        """Make the latest segment, or its first positions, part of the state, in one assignment.

        Nothing happens if it already is, if all sequences were idle, or after a clear, reorder or put since. For a part
        a ring advances by fewer rows. Where a state is replaced, the part runs again from the state before the segment;
        the segment's result is then no longer valid. `parts.refusal` says what a model allows.

        Args:
            counts: int32 [b], positions to keep of each sequence, 0 … those that ran; all 0 drop the segment. None: all
                that ran.

        Raises:
            UsageError: more than ran, or the model allows no such part; the segment can still be committed.
            BackendError: the engine failed where the part ran again; the state is the one before the segment.
        """
        return

    def written(self) -> Iterable[tuple[StateTensor, Array]]:
        """Return the "replace" states, [.., B, ..], that an uncommitted segment returned.

        Entries of idle sequences may be old ones: a segment is computed up to the last sequence that is not idle.
        """
        return ()

    def clear(self, rows: Indices) -> None:
        """Set sequences to their first state."""

    def limit(self, rows: Indices, most: int) -> None:
        """Limit the memory rows that the sequences at these indices keep; the limit stays with the index on reorder."""
        return

    def prepare_reorder(self, rows: Indices) -> None:
        """Allocate the memory that `reorder` needs for these rows, or raise `BackendError`; the state is unchanged."""
        return

    def reorder(self, rows: Indices) -> None:
        """Make sequence i what sequence rows[i] was, and clear sequences len(rows) … B - 1."""

    def take(self, row: int, names: Collection[str] | None = None) -> RowState:
        """Return a copy of one sequence's state, with all its tensors or those in `names`."""

    def put(self, row: int, state: RowState) -> None:
        """Set a cleared sequence to a state that `take` returned."""


class LoopState(Loop):
    """The half of a loop that is the same for all engines: it clears, reorders, takes and puts sequences.

    Args:
        lock: a lock that is held while states are changed or read.

    Attributes:
        counters: fill, head and side of every sequence.
        placements: the states' arrays; the subclass opens them.
        counts: the counters that programs read, by the names of their inputs.
    """

    placements: tuple[Placement, ...]
    turning = False
    """True if a reordering writes the states to the other of the two sets of tensors."""

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
        self._tried: tuple[Mapping[str, Array], int] = {}, 0  # inputs and b of the latest segment without a commit
        self._counted: tuple[Ids | None, int] = None, 0

    @property
    def fill(self) -> Ids:
        return self.counters.fill

    @property
    def heads(self) -> Ids:
        heads: Ids = self.counters.head.copy()
        return heads

    def count(self, counts: Ids) -> int:
        """Set the positions that count in a segment, int32 [b], and return the number of sequences to compute.

        Those are the first ones, up to the last that is not idle: 2 for counts [0, 3, 0], 0 if all are idle.
        """
        self._computed = 0  # if the segment fails, `commit` finds nothing
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
        if counts.base is None and not counts.flags.writeable:  # a constant array (`inputs.Segments`) is read once
            self._counted = counts, rows
        return rows

    def commit(self, counts: Ids | None = None) -> None:
        computed = self._computed if counts is None else self._accept(counts)
        self._computed = 0  # cleared first: after an interrupt it must not commit twice
        self._tried = {}, 0
        if computed:
            with self._lock:
                self.counters.advance(computed, self._spill)

    def _accept(self, counts: Ids) -> int:
        """Set the positions that count; return the number of sequences to commit, 0 if none counts or the part ran."""
        computed, (inputs, b) = self._computed, self._tried
        if not computed:
            return 0
        kept, ran = counts.tolist(), self.counters.valid[:b].tolist()
        self.parts.check(kept, ran)
        if kept == ran or not any(kept):
            return computed if any(kept) else 0
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
        self.counters.most[rows] = most  # no lock: every loop keeps its counters on the host
        np.minimum(self.fill, self.counters.most, out=self.fill)

    def clear(self, rows: Indices) -> None:
        self._computed = 0  # an uncommitted segment began from a different state
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
    """A stand-in for objects of a closed model: any use of it raises UsageError."""

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
        name, description: the engine's name for programs and for people.
        update: the update rule of its programs.
        programs: the programs that it runs.
    """

    name: str
    description: str
    update: str
    programs: tuple[Program, ...]

    def fitting(self, manifest: Manifest, sequences: int) -> Manifest:
        """Return the manifest to open a stream of `sequences` with: the same, or one of a smaller B."""
        return manifest

    def open_loop(self, manifest: Manifest, initial: Initial) -> Loop:
        """Return a loop of fresh sequences.

        Args:
            manifest: manifest of the bundle, or what `fitting` returned.
            initial: first values of the states, from `initial_values`.
        """

    def release_pages(self) -> None:
        """Release memory-mapped pages of the weight file; the system reads them again when they are needed."""
