"""What the states of all loops have in common: how they start, how far sequences have come, and one sequence's state.

A state tensor has a placement: where its bytes stand and how a step moves them. "replace": every step returns the whole
tensor. "rolled": every step returns all memory rows, those that exist last. "ring": a step writes the segment's
rows in place. A loop keeps the tensors of one placement together and asks nothing else of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import StateTensor
from txl_runtime.errors import BundleError
from txl_runtime.streaming.programs import start_shape
from txl_runtime.types import Array, Arrays, Ids, Indices

Initial = Arrays
"""What a state is before anything was seen, by its name; a memory row's broadcasts over sequences and rows."""


Placed = TypeVar("Placed", bound="Placement")


@dataclass(frozen=True)
class RowState:
    """The state of one sequence.

    Attributes:
        fill: memory rows that exist.
        head: the ring's slot for the next row: rounding depends on it, the function does not. 0 without a ring.
        tensors: the rows, oldest first, float32 [fill, ...] each; whole tensors of any dtype, without the axis of
            sequences, where a step returns them whole.
    """

    fill: int
    head: int
    tensors: Arrays


class SequenceCounters:
    """How far each sequence has come: its fill, a ring's head, and which of two sets of tensors it stands in.

    All of it is one array, one row for each counter and one column for each sequence. So a step is committed in one
    assignment, whatever the placements. NumPy makes the assignment in one call, and Python looks at signals only
    between calls: an interrupt finds the array as it was or as it will be. The columns of idle sequences change sides
    with the others, because their graph returned their state unchanged on the other side.

    Attributes:
        ring: slots of a ring; None where no state is in one.
        valid: int32 [B], the positions of the segment that count; programs are bound to this array.
        fill: int32 [B], memory rows that exist, 0 … M; likewise.
        most: int32 [B], how many may exist: M, or fewer where that is limited.
        head: int32 [B], the slot of each sequence's next row in a ring; likewise. Zeros without a ring.
        sides: int32 [B], which of two sets of tensors holds each sequence; zeros where there is one set alone.
        apart: whether sequences may stand on different sides.
        read: int32 [2 or 3, B], what programs read of these: valid, fill, and the head of a ring.
    """

    def __init__(self, manifest: Manifest, states: Sequence[StateTensor]) -> None:
        self.ring = next((state.slots for state in states if state.slots is not None), None)
        turns = any(state.slots is None for state in states)
        self._counts = self.ring is not None or "fill" in manifest.counters
        names = ["valid", "fill", *(["head"] if self.ring is not None else []), *(["sides"] if turns else [])]
        table = np.zeros((len(names), manifest.batch_size), np.int32)
        self._now, self._next = table[1:], np.zeros_like(table[1:])
        now: dict[str, Ids] = dict(zip(names, table, strict=True))
        after: dict[str, Ids] = dict(zip(names[1:], self._next, strict=True))
        absent = np.zeros_like(table[0])
        self.valid, self.fill, self.read = now["valid"], now["fill"], table[: 3 if "head" in now else 2]
        self.head, self.sides = now.get("head", absent), now.get("sides", absent)
        self._next_fill, self._next_head, self._next_sides = after["fill"], after.get("head"), after.get("sides")
        self.apart = False
        self.most, self._fresh = np.full_like(self.fill, manifest.memory_length), manifest.fresh_fill

    @property
    def side(self) -> int:
        """Which of two sets of tensors holds the first sequence; 0 where there is one set alone."""
        side: int = 0 if self._next_sides is None else self.sides.item(0)
        return side

    def advance(self, computed: int, spill: Callable[[int, int], None]) -> None:
        """Let a segment be done whose positions `valid` counts, in one assignment.

        Before that, `spill` is called with every sequence whose step ended beyond the ring and the number of its rows
        that did: it copies them to the front. The slots there hold no row that can be seen before the step, since a
        ring has R >= M + L slots.

        Args:
            computed: how many sequences the step computed, from the first on: they stood on one side, and these alone
                change it.
            spill: of the ring's tensors.
        """
        if self._counts and len(self.valid) == 1:  # a few numbers are faster in Python than in NumPy
            valid = self.valid.item()
            self._next_fill[0] = min(self.fill.item() + valid, self.most.item())
            if self._next_head is not None and self.ring is not None:
                lap, self._next_head[0] = divmod(self.head.item() + valid, self.ring)
                if lap:
                    spill(0, self._next_head.item())
        elif self._counts:
            np.add(self._now, self.valid, out=self._next)  # the row of sides, too, which is overwritten below
            np.minimum(self._next_fill, self.most, out=self._next_fill)
            head, ring = self._next_head, self.ring
            # Python's max of B numbers is faster than NumPy's.
            if head is not None and ring is not None and max(head.tolist()) >= ring:
                for row in np.flatnonzero(head >= ring).tolist():
                    head[row] -= ring
                    spill(row, int(head[row]))
        after = self._next_sides
        if after is not None:
            other, self.apart = 1 - self.sides.item(0), computed < len(after)
            if self.apart:
                after[...] = self.sides
                after[:computed] = other
            else:
                after.fill(other)
        self._now[...] = self._next

    def clear(self, rows: Indices) -> None:
        """See `streaming.loop.Loop`. The side of a sequence does not change."""
        self.fill[rows] = np.minimum(self._fresh, self.most[rows])
        self.head[rows] = 0

    def reorder(self, rows: Indices, side: int) -> None:
        """See `streaming.loop.Loop`; all sequences stand on this side afterwards, where there are two."""
        fill, head = self.fill[rows], self.head[rows]
        self.clear(np.arange(len(self.fill)))
        np.minimum(fill, self.most[: len(rows)], out=self.fill[: len(rows)])
        self.head[: len(rows)] = head
        if self._next_sides is not None:
            self.sides[:] = side

    def put(self, row: int, fill: int, head: int) -> None:
        """Set what stands in one sequence."""
        self.fill[row] = min(fill, int(self.most[row]))
        if self.ring is not None:
            self.head[row] = head % self.ring


class Placement(Protocol):
    """The state tensors of a loop that are placed alike, wherever they lie. The counters say how far they have come."""

    def spill(self, row: int, count: int) -> None:
        """Copy the rows that a sequence wrote behind its ring to the ring's first slots; others never spill."""
        return

    def take(self, row: int, fill: int, names: Collection[str] | None) -> Arrays:
        """Copies of one sequence's tensors as `RowState` has them: of all that there are, or of those named."""

    def put(self, row: int, tensors: Arrays) -> None:
        """Give a cleared sequence, whose counters are set, tensors that were taken; others are left out."""

    def clear(self, rows: Indices) -> None:
        """Make sequences what they are before anything was seen."""

    def prepare_reorder(self, rows: Indices) -> None:
        """See `streaming.loop.Loop`."""
        return

    def reorder(self, rows: Indices, side: int) -> None:
        """Make sequence i, on one side, what sequence rows[i] was; those behind the last are cleared."""

    def written(self, side: int) -> Iterable[tuple[StateTensor, Array]]:
        """The replaced states, [.., B, ..], as the last step wrote them to this side; empty for memory rows."""
        return ()


def placed_alike(
    states: Sequence[StateTensor], placements: Mapping[str, type[Placed]]
) -> Iterator[tuple[type[Placed], list[StateTensor]]]:
    """The placements, given by update rule, that some of the states have, and the states of each."""
    for rule, placement in placements.items():
        if alike := [state for state in states if state.update == rule]:
            yield placement, alike


def with_sequence(
    states: Sequence[StateTensor], arrays: Sequence[Array | None], row: int, tensors: Arrays, batch_size: int
) -> list[Array | None]:
    """States [.., B, ..] in which one sequence has tensors that were taken; those of the same shape are written to.

    Where a tensor has another number of rows than before, other sequences have zeros there.
    """
    found: list[Array | None] = []
    for state, array in zip(states, arrays, strict=True):
        given, axis = tensors.get(state.name), state.batch_axis
        if given is None or axis is None:
            found.append(given)
            continue
        shape = (*given.shape[:axis], batch_size, *given.shape[axis:])
        after = np.zeros(shape, given.dtype) if array is None or array.shape != shape else array
        after[state.axes.at(row)] = given
        found.append(after)
    return found


def ring_rows(head: int, count: int, ring: int) -> Indices:
    """The slots of the newest `count` rows of a ring whose next row goes to slot `head`, oldest first."""
    return np.arange(head - count, head) % ring


def initial_values(bundle: Bundle) -> Initial:
    """What each state starts as: a number, or what the weight file says.

    Raises:
        BundleError: a stored tensor does not have the shape of the state's rows, or does not broadcast over a state
            that has none.
    """
    states = bundle.manifest.states
    stored = {state.initial for state in states if isinstance(state.initial, str)}
    tensors: Arrays = bundle.weights(*stored) if stored else {}
    initial: dict[str, Array] = {}
    for state in states:  # a state starts as the same in every update rule
        if not isinstance(state.initial, str):
            exact = np.float64 if state.update == "replace" else np.float32
            initial[state.name] = np.asarray(state.initial or 0, exact)
            continue
        found = initial[state.name] = tensors[state.initial]
        whole = state.update == "replace"
        dtype, shape = (state.dtype, state.sequence_shape) if whole else ("float32", state.row_shape)
        if found.dtype != dtype or not (_broadcasts(found.shape, shape) if whole else found.shape == shape):
            what = "which broadcasts over" if whole else "one row of"
            raise BundleError(
                f"{bundle.path}: {state.initial} is {found.dtype} {list(found.shape)}, expected {dtype} "
                f"{list(shape)}, {what} {state.name}; export the model again"
            )
    return initial


def start_of(state: StateTensor, value: Array) -> Array:
    """What sequences start as: a view that broadcasts over the state of any number of them.

    Args:
        value: from `initial_values`: of one sequence, or of one memory row.
    """
    shape = start_shape(state)
    if value.ndim == 0 or shape is None or 0 in shape:
        return value if value.ndim == 0 else np.zeros((), value.dtype)
    if state.update != "replace":
        return np.expand_dims(value, [axis for axis in (state.batch_axis, state.row_axis) if axis is not None])
    if state.batch_axis is None:
        return value
    one = (*shape[: state.batch_axis], *shape[state.batch_axis + 1 :])
    return np.expand_dims(np.broadcast_to(value, one), state.batch_axis)


def _broadcasts(shape: tuple[int, ...], over: tuple[int, ...]) -> bool:
    fit = all(size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(over), strict=False))
    return fit and len(shape) <= len(over)
