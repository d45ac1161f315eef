"""What the memories of all loops have in common: how rows start, how far sequences have come, one sequence's state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.streaming.outputs import Output
from txl_runtime.streaming.parts import Parts
from txl_runtime.streaming.state import RowState
from txl_runtime.types import Array, Floats, Ids, Indices


class Counters:
    """How far each sequence has come: its fill, and the ring's head or the side that its rolled memory is on.

    All of it is one array, so that a step is committed in one assignment.

    Attributes:
        valid: int32 [B], the rows of the segment that count; a view that programs may be bound to.
        fill: int32 [B], memory rows that exist, 0 … M; a view likewise.
        most: int32 [B], how many may exist: M, or fewer where that is limited.
        head: int32 [B], the slot of each sequence's next row in a ring; a view likewise. Only a ring has it.
        read: int32 [2 or 3, B], what programs read of these, in this order.
    """

    def __init__(self, batch_size: int, memory_length: int, fresh_fill: int, ring: int | None) -> None:
        table = np.zeros((3, batch_size), np.int32)
        self.valid, self.fill, self.head = table
        self.read, self._now = table if ring is not None else table[:2], table[1:]
        self._next = np.zeros_like(self._now)
        self._next_fill, self._next_head = self._next
        self.most, self._fresh, self._ring = np.full(batch_size, memory_length, np.int32), fresh_fill, ring

    @property
    def side(self) -> int:
        """Which of two sets of tensors holds the first sequence's memory; a ring has one set, 0."""
        return 0 if self._ring is not None else int(self._now[1, 0])

    @property
    def sides(self) -> Ids:
        """The same of every sequence of rolled memory, [B], a view: a step of some sequences turns these alone."""
        return self.head

    @property
    def heads(self) -> Ids:
        """A copy of the heads, [B]; zeros where rows move instead."""
        return np.zeros_like(self.head) if self._ring is None else self.head.copy()

    def advance(self, valid: Ids, spill: Callable[[int, int], None], computed: int | None = None) -> None:
        """Let a step of `valid` [B] rows be done, in one assignment; `computed` are the sequences it computed, or all.

        Before that, `spill` is called with every sequence whose step ended beyond the ring and the number of its rows
        that did: it copies them to the front. The slots there hold no row that can be seen before the step, since a
        ring has R >= M + L slots.
        """
        fill, head = self._next_fill, self._next_head
        np.add(self._now, valid, out=self._next)
        np.minimum(fill, self.most, out=fill)
        if self._ring is None:
            head[...] = self.head
            np.subtract(1, head[:computed], out=head[:computed])
        elif max(head.tolist()) >= self._ring:  # numpy takes longer over so few
            for row in np.flatnonzero(head >= self._ring).tolist():
                head[row] -= self._ring
                spill(row, int(head[row]))
        self._now[...] = self._next

    def turn(self) -> None:
        """Change sides, after all of a rolled memory was copied to the other one."""
        self._now[1] = 1 - self._now[1]

    def clear(self, rows: Indices) -> None:
        """See `streaming.loop.Loop`."""
        self.fill[rows] = np.minimum(self._fresh, self.most[rows])
        if self._ring is not None:
            self.head[rows] = 0

    def reorder(self, rows: Indices) -> None:
        """See `streaming.loop.Loop`."""
        fill, head = self.fill[rows], self.head[rows]
        self.clear(np.arange(len(self.fill)))
        np.minimum(fill, self.most[: len(rows)], out=self.fill[: len(rows)])
        if self._ring is not None:
            self.head[: len(rows)] = head

    def put(self, row: int, fill: int, head: int) -> None:
        """Set what stands in one sequence."""
        self.fill[row] = min(fill, int(self.most[row]))
        if self._ring is not None:
            self.head[row] = head % self._ring


def open_counters(update: str, manifest: Manifest) -> Counters:
    """Counters of fresh sequences for an update rule."""
    ring = manifest.states_of("ring")[0].slots if update == "ring" else None
    return Counters(manifest.batch_size, manifest.memory_length, manifest.fresh_fill, ring)


class Tensors(Protocol):
    """The tensors of a loop's state, wherever they lie. The counters say which rows of them exist."""

    def move_to_front(self, row: int, count: int) -> None:
        """Copy the rows that a sequence spilled behind its ring to the ring's first slots; others never spill."""
        return

    def newest(self, row: int, count: int, names: Collection[str] | None = None) -> dict[str, Floats]:
        """Copies of the newest rows of one sequence, oldest first, [count, ...] per tensor, of some or of all."""

    def place(self, row: int, rows: Mapping[str, Floats]) -> None:
        """Make rows [count, ...] per tensor the newest of one cleared sequence, where its counters say."""

    def clear(self, rows: Indices) -> None:
        """Make sequences what they are before anything was seen."""

    def reorder(self, rows: Indices) -> None:
        """Make sequence i what sequence rows[i] was; those behind the last are cleared."""


class LoopState:
    """The half of a loop that does not depend on its engine: sequences are cleared, reordered, taken out and put back.

    The methods are those of `streaming.loop.Loop`.

    Args:
        update: the rule of the memory.
        manifest: of the bundle.
        lock: held while the memory is changed or read.

    Attributes:
        counters, memory: how far sequences have come, and their tensors; `memory` is the subclass's to open.
        valid: int32 [B], the rows of the segment that count; `counts` has it and the counters by the programs' names.
    """

    memory: Tensors

    def __init__(self, update: str, manifest: Manifest, lock: AbstractContextManager[object]) -> None:
        self.counters = open_counters(update, manifest)
        self.valid = self.counters.valid
        self.counts: dict[str, Ids] = {"valid": self.valid, "fill": self.counters.fill}
        if update == "ring":
            self.counts["head"] = self.counters.head
        self._lock = lock

    @property
    def fill(self) -> Ids:
        """See `Loop`."""
        return self.counters.fill

    @property
    def heads(self) -> Ids:
        """See `Loop`."""
        return self.counters.heads

    def advance(self) -> None:
        """Make a segment whose rows `valid` counts part of the state, in one assignment."""
        self.counters.advance(self.valid, self.memory.move_to_front)

    def limit(self, rows: Indices, most: int) -> None:
        """See `Loop`. The counters lie on the host whatever the loop, so no lock is taken."""
        self.counters.most[rows] = most
        np.minimum(self.fill, self.counters.most, out=self.fill)

    def clear(self, rows: Indices) -> None:
        """See `Loop`."""
        with self._lock:
            self.memory.clear(rows)
            self.counters.clear(rows)

    def reorder(self, rows: Indices) -> None:
        """See `Loop`."""
        with self._lock:
            self.memory.reorder(rows)
            self.counters.reorder(rows)
        self.valid[:] = 0  # sequences that are gone are idle from now on

    def take(self, row: int, names: Collection[str] | None = None) -> RowState:
        """See `Loop`."""
        fill, head = int(self.counters.fill[row]), int(self.counters.heads[row])
        with self._lock:
            return RowState(fill, head, self.memory.newest(row, fill, names))

    def put(self, row: int, state: RowState) -> None:
        """See `Loop`."""
        with self._lock:
            self.counters.put(row, state.fill, state.head)
            self.memory.place(row, state.tensors)


def ring_rows(head: int, count: int, ring: int) -> Indices:
    """The slots of the newest `count` rows of a ring whose next row goes to slot `head`, oldest first."""
    return np.arange(head - count, head) % ring


class RowsResult:
    """The result of a segment that is made of the rows its program returned. See `loop.Result`."""

    __slots__ = ("_counts", "_output", "_rows", "_targets")

    def __init__(self, rows: Floats, counts: Ids, targets: Ids | None, output: Output) -> None:
        self._rows, self._counts, self._targets, self._output = rows, counts, targets, output

    def rows(self) -> Floats:
        """See `loop.Result`."""
        return self._rows

    def last(self) -> Floats:
        """See `loop.Result`."""
        rows = self.rows()
        if rows.shape[1] == 1:
            return rows[:, 0]
        last: Floats = rows[np.arange(len(rows)), np.maximum(self._counts, 1) - 1]
        return last

    def parts(self) -> Parts | None:
        """See `loop.Result`; there are rows alone."""
        return None

    def nll(self) -> Floats:
        """See `loop.Result`."""
        rows, targets = self.rows(), self._targets
        assert targets is not None, "targets are among the inputs of a segment whose nll is asked for"
        return self._output.nll(rows.reshape(targets.size, -1), targets.ravel()).reshape(targets.shape)

    def outputs(self) -> dict[str, Array]:
        """See `loop.Result`."""
        rows, output = self.rows(), self._output
        logprobs = np.zeros((*rows.shape[:2], output.clusters[-1][1]), np.float32)
        output.counted(rows, self._counts, logprobs)
        return {output.name: logprobs}
