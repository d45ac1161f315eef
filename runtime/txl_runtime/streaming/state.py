"""The parts of the state that all loops share: first values, counters of sequences, and one sequence's state.

A state tensor has a placement, which says where its bytes lie and how a step changes them. "replace": every step
returns the whole tensor. "rolled": every step returns all memory rows, the newest last. "ring": a step writes only the
segment's rows, in place. A loop keeps the tensors of one placement together and calls only the methods of `Placement`.
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
"""First values of states by name. A memory tensor has one row here, which is repeated for all sequences and rows."""


Placed = TypeVar("Placed", bound="Placement")


@dataclass(frozen=True)
class RowState:
    """The state of one sequence.

    Attributes:
        fill: number of memory rows.
        head: the ring slot of the next row; only rounding depends on it. 0 without a ring.
        tensors: memory tensors, float32 [fill, ...], oldest row first; and "replace" states of any type. No tensor has
            an axis of sequences.
    """

    fill: int
    head: int
    tensors: Arrays


class SequenceCounters:
    """The counters of each sequence: its fill, its ring head, and its side, which is 0 or 1 for one of two sets of
    tensors.

    The counters are one array, one row for each counter and one column for each sequence, so that a step is committed
    in one assignment for all placements. NumPy makes the assignment in one call, and Python handles signals only
    between calls: an interrupt finds either the old array or the new array. Idle sequences change sides too, because
    the graph has copied their unchanged state to the new side.

    Attributes:
        ring: number of slots of a ring; None without a ring.
        valid: int32 [B], number of positions of the segment that count; programs are bound to this array.
        fill: int32 [B], number of memory rows, 0 … M; programs are bound to this array.
        most: int32 [B], largest allowed fill: the memory length M, or less if `Loop.limit` was called.
        head: int32 [B], the ring slot of each sequence's next row; programs are bound to this array. Zeros without a
            ring.
        sides: int32 [B], 0 or 1, the set of tensors that holds each sequence; zeros if there is only one set.
        apart: whether sequences may be on different sides.
        read: int32 [2 or 3, B], the counters that programs read: valid, fill and, with a ring, head.
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
        """The side of sequence 0; 0 if there is only one set of tensors."""
        side: int = 0 if self._next_sides is None else self.sides.item(0)
        return side

    def advance(self, computed: int, spill: Callable[[int, int], None]) -> None:
        """Commit a segment with `valid` positions in one assignment.

        Before that, `spill(row, n)` is called for every sequence whose last n rows were written behind the ring's last
        slot, to copy them to the front. The slots at the front are free, since a ring has R >= M + L slots (memory
        length plus segment length). With R = 6, head 5 and valid 2, head becomes 1 and one row spills.

        Args:
            computed: number of leading sequences that the step computed; only these change sides.
            spill: the function that copies spilled rows in all tensors of a ring.
        """
        if self._counts and len(self.valid) == 1:  # for one sequence, Python's numbers are faster than NumPy
            valid = self.valid.item()
            self._next_fill[0] = min(self.fill.item() + valid, self.most.item())
            if self._next_head is not None and self.ring is not None:
                lap, self._next_head[0] = divmod(self.head.item() + valid, self.ring)
                if lap:
                    spill(0, self._next_head.item())
        elif self._counts:
            # this also adds to the row of sides, which is overwritten below
            np.add(self._now, self.valid, out=self._next)
            np.minimum(self._next_fill, self.most, out=self._next_fill)
            head, ring = self._next_head, self.ring
            # for a few numbers, Python's max is faster than NumPy's
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
        """Reset the fill and head of sequences; their side does not change.

        For example, `clear([1])` turns fill [16, 9] into [16, 0].
        """
        self.fill[rows] = np.minimum(self._fresh, self.most[rows])
        self.head[rows] = 0

    def reorder(self, rows: Indices, side: int) -> None:
        """Reorder the counters as `Loop.reorder` does; with two sides, all sequences are on `side` afterwards.

        For example, rows [1, 1] turn fill [16, 9] into [9, 9].
        """
        fill, head = self.fill[rows], self.head[rows]
        self.clear(np.arange(len(self.fill)))
        np.minimum(fill, self.most[: len(rows)], out=self.fill[: len(rows)])
        self.head[: len(rows)] = head
        if self._next_sides is not None:
            self.sides[:] = side

    def put(self, row: int, fill: int, head: int) -> None:
        """Set the fill and head of one sequence."""
        self.fill[row] = min(fill, int(self.most[row]))
        if self.ring is not None:
            self.head[row] = head % self.ring


class Placement(Protocol):
    """The state tensors of a loop that have the same placement, on the host or a device."""

    def spill(self, row: int, count: int) -> None:
        """Copy the `count` rows written behind the ring's last slot to slots 0 … count-1; only rings need this."""
        return

    def take(self, row: int, fill: int, names: Collection[str] | None) -> Arrays:
        """Return copies of one sequence's tensors in the form of `RowState`: all of them, or the tensors in `names`.

        For example, {"layers.00.hidden": [9, 32]} with `fill` 9.
        """

    def put(self, row: int, tensors: Arrays) -> None:
        """Set a cleared sequence, whose counters are set, to tensors that `take` returned.

        Tensors that belong to other placements are ignored. For example, {"layers.00.hidden": [9, 32]}.
        """

    def clear(self, rows: Indices) -> None:
        """Set sequences to their first state. For example, `clear([1, 3])`."""

    def prepare_reorder(self, rows: Indices) -> None:
        """Allocate the memory that `reorder` needs, as `Loop.prepare_reorder` does.

        For example, `prepare_reorder([1, 1])`.
        """
        return

    def reorder(self, rows: Indices, side: int) -> None:
        """Give sequence i, on `side`, the former state of sequence rows[i]; clear sequences len(rows) … B - 1.

        For example, [1, 1] copies sequence 1 to sequence 0 too.
        """

    def written(self, side: int) -> Iterable[tuple[StateTensor, Array]]:
        """Return the "replace" states, [.., B, ..], that the last step wrote to this side; () for memory rows.

        For example, state "h" as [2, 32].
        """
        return ()


def placed_alike(
    states: Sequence[StateTensor], placements: Mapping[str, type[Placed]]
) -> Iterator[tuple[type[Placed], list[StateTensor]]]:
    """Yield each placement class with the states that have its update rule; skip classes without a state."""
    for rule, placement in placements.items():
        if alike := [state for state in states if state.update == rule]:
            yield placement, alike


def with_sequence(
    states: Sequence[StateTensor], arrays: Sequence[Array | None], row: int, tensors: Arrays, batch_size: int
) -> list[Array | None]:
    """Return states [.., B, ..] in which sequence `row` has the given tensors; arrays of the right shape are reused.

    If a tensor's number of rows changes, a new array is made, in which the other sequences are zero. For example, {"h":
    [32]} becomes row 1 of [2, 32].
    """
    arrays_after: list[Array | None] = []
    for state, array in zip(states, arrays, strict=True):
        tensor, axis = tensors.get(state.name), state.batch_axis
        if tensor is None or axis is None:
            arrays_after.append(tensor)
            continue
        shape = (*tensor.shape[:axis], batch_size, *tensor.shape[axis:])
        after = np.zeros(shape, tensor.dtype) if array is None or array.shape != shape else array
        after[state.axes.at(row)] = tensor
        arrays_after.append(after)
    return arrays_after


def ring_rows(head: int, count: int, ring: int) -> Indices:
    """Return the ring slots of the newest `count` rows, oldest first: [5, 0, 1] for head 2, count 3 and 6 slots."""
    return np.arange(head - count, head) % ring


def initial_values(bundle: Bundle) -> Initial:
    """Return the first value of each state by name: a number, or a tensor of the weight file.

    Raises:
        BundleError: a stored tensor does not have the shape of a memory row, or does not broadcast to a "replace"
            state.
    """
    states = bundle.manifest.states
    stored = {state.initial for state in states if isinstance(state.initial, str)}
    tensors: Arrays = bundle.weights(*stored) if stored else {}
    initial: dict[str, Array] = {}
    for state in states:  # `agreement` checked that a name has the same first value in every update rule
        if not isinstance(state.initial, str):
            exact = np.float64 if state.update == "replace" else np.float32
            initial[state.name] = np.asarray(state.initial or 0, exact)
            continue
        tensor = initial[state.name] = tensors[state.initial]
        whole = state.update == "replace"
        dtype, shape = (state.dtype, state.sequence_shape) if whole else ("float32", state.row_shape)
        if tensor.dtype != dtype or not (_broadcasts(tensor.shape, shape) if whole else tensor.shape == shape):
            what = "which broadcasts over" if whole else "one row of"
            raise BundleError(
                f"{bundle.path}: {state.initial} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} "
                f"{list(shape)}, {what} {state.name}; export the model again"
            )
    return initial


def start_of(state: StateTensor, value: Array) -> Array:
    """Return a view of a state's first value that broadcasts over any number of sequences and rows.

    For example, the first value [32] of a state ["B", 32] is viewed as [1, 32].

    Args:
        value: first value from `initial_values`: one sequence's state, or one memory row.
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
