"""The states of a loop on a device: blocks of memory to which programs are bound, one class for each placement.

"replace" and "rolled" states have two sides: every step reads the block of one side and writes that of the opposite
side. A ring has one block, into which a step writes the segment's rows. `SequenceCounters` has the fill of each
sequence and the side, which is the same for all sequences here.

A state has the same offset in both blocks, with room for its largest shape. In a state [pre, B, post], one sequence's
part is `pre` pieces of `post` values, B * post values apart, which one copy can move. All memory tensors have the same
shape, so one copy can also move one sequence's part of all of them.

To add a placement, write a class here and add it to `PLACEMENTS`; see `host.placements`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from txl_runtime.bundle.tables import Program, StateTensor
from txl_runtime.device.cuda import Block, Device, Queue
from txl_runtime.device.dtypes import from_float32, stored_type, to_float32
from txl_runtime.device.interface import aligned, host_address
from txl_runtime.device.tail import Tail
from txl_runtime.streaming.programs import Shapes, shapes_after, start_shape
from txl_runtime.streaming.state import (
    Initial,
    Placement,
    SequenceCounters,
    placed_alike,
    ring_rows,
    start_of,
    with_sequence,
)
from txl_runtime.types import Array, Arrays, Indices

Addresses = Mapping[str, int]
"""Device addresses by the names of a program's inputs or outputs."""


class StridedPieces(NamedTuple):
    """The place of one sequence's part of a state, or of several states, in a block.

    Attributes:
        start: offset of the first sequence's first piece, in bytes.
        step: bytes from one sequence to the next; 0 for a state that sequences share.
        width, number, pitch: bytes per piece, number of pieces, and bytes from one piece to the next.
        dtype, shape: type and shape of all pieces together.
        fresh: device address of a sequence's first value; 0 for zeros.
    """

    start: int
    step: int
    width: int
    number: int
    pitch: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fresh: int


class DevicePlacement(Placement):
    """A placement with the additional methods that the loop on a device calls.

    Callers hold the lock. All work is put into the queue inside a block `with tail`.

    Args:
        device, queue: the device of the blocks, and the queue that orders all work on them.
        initial: first values of the states, from `initial_values`.

    Attributes:
        sides: number of blocks, 2 or 1.
        shapes: the states' shapes on each side, if they decide which program runs.
        grows: whether a step may change the states' shapes.
    """

    sides, grows = 2, False

    def __init__(
        self,
        device: Device,
        queue: Queue,
        tail: Tail,
        states: Sequence[StateTensor],
        initial: Initial,
        counters: SequenceCounters,
    ) -> None:
        self._device, self._queue, self._tail, self._states, self._counters = device, queue, tail, states, counters
        self._batch, self._types = len(counters.valid), [stored_type(state.dtype) for state in states]
        sizes = [math.prod(state.shape) * dtype.itemsize for state, dtype in zip(states, self._types, strict=True)]
        self._offsets = [0, *accumulate(map(aligned, sizes))]
        self._blocks: list[Block] = []
        self._templates: list[Block] = []
        self._start: Shapes = ()
        self.shapes: list[Shapes] = [(), ()]
        self._open(initial)

    def _open(self, initial: Initial) -> None:
        """Allocate the blocks, and store the states' first values on the device."""
        self._blocks += [self._allocate() for _ in range(self.sides)]

    @abstractmethod
    def _pieces(self, shapes: Shapes) -> Collection[StridedPieces]:
        """Return the places in a block of states that have these shapes."""

    def addresses(self, program: Program, side: int) -> tuple[Addresses, Addresses]:
        """Return the addresses of a program's state inputs and outputs by name, when the sequences are on `side`."""
        input_names, places = (
            {spec.name for spec in program.inputs},
            list(zip(self._states, self._offsets, strict=False)),
        )
        now, after = (self._blocks[number % self.sides].address for number in (side, side + 1))
        inputs = {state.input: now + offset for state, offset in places if state.input in input_names}
        return inputs, {state.output: after + offset for state, offset in places}

    def after(self, program: Program) -> Shapes:
        """Return the states' shapes after a program has run."""
        return ()

    def clear(self, rows: Indices) -> None:
        side, some = self._side, np.unique(rows).tolist()
        if len(some) < self._batch:
            with self._tail:
                self._clear(side, some, self.shapes[side])
            return
        with self._tail:
            for pieces in self._pieces(self._start):
                if pieces.fresh:
                    for row in range(self._batch if pieces.step else 1):
                        self._begin(side, row, pieces)
                else:
                    self._queue.zero(self._at(side, 0, pieces), pieces.number * pieces.pitch)
        self.shapes[side] = self._start

    def reorder(self, rows: Indices, side: int) -> None:
        moves, shapes = list(enumerate(rows.tolist())), self.shapes[1 - side]
        with self._tail:
            for pieces in self._pieces(shapes):
                for row, old in moves if pieces.step else moves[:1]:
                    self._copy(self._at(side, row, pieces), self._at(1 - side, old, pieces), pieces)
            self._clear(side, range(len(rows), self._batch), shapes)
        self.shapes[side] = shapes

    @property
    def _side(self) -> int:
        """The side on which all sequences are."""
        return self._counters.side % self.sides

    def _clear(self, side: int, rows: Iterable[int], shapes: Shapes) -> None:
        every = self._pieces(shapes)
        for row in rows:
            for pieces in every:
                if pieces.step:
                    self._begin(side, row, pieces)

    def _begin(self, side: int, row: int, pieces: StridedPieces) -> None:
        """Set one sequence's part of a state to its first value."""
        place = self._at(side, row, pieces)
        if pieces.fresh:
            self._copy(place, pieces.fresh, pieces, pieces.width)
        else:
            self._queue.zero(place, pieces.width, pieces.number, pieces.pitch)

    def _keep(self, fresh: Array) -> int:
        """Store one sequence's first value on the device; return its address, or 0 if the value is all zeros."""
        fresh = np.ascontiguousarray(fresh)
        if not fresh.view(np.uint8).any():
            return 0
        block = self._device.allocate(fresh.nbytes)
        self._templates.append(block)
        with self._tail:
            self._queue.send(block.address, host_address(fresh), fresh.nbytes)
        self._tail.wait()  # wait, because the host array is freed when this method returns
        return block.address

    def _fetch(self, side: int, row: int, parts: Mapping[str, StridedPieces]) -> dict[str, Array]:
        """Return copies on the host of one sequence's parts of the states, by name."""
        arrays = {name: np.empty(pieces.shape, pieces.dtype) for name, pieces in parts.items()}
        with self._tail:
            for name, pieces in parts.items():
                place, width = self._at(side, row, pieces), pieces.width
                self._queue.fetch(host_address(arrays[name]), place, width, pieces.number, width, pieces.pitch)
        self._tail.wait()
        return arrays

    def _send(self, side: int, row: int, parts: Mapping[str, StridedPieces], tensors: Arrays) -> None:
        """Copy one sequence's parts of the states from the host to the device."""
        arrays = {name: np.ascontiguousarray(tensors[name], pieces.dtype) for name, pieces in parts.items()}
        with self._tail:
            for name, pieces in parts.items():
                place, width = self._at(side, row, pieces), pieces.width
                self._queue.send(place, host_address(arrays[name]), width, pieces.number, pieces.pitch, width)
        self._tail.wait()  # wait, because the host arrays are freed when this method returns

    def _copy(self, to: int, source: int, pieces: StridedPieces, source_pitch: int = 0) -> None:
        """Copy one sequence's part within the device; `source_pitch` is the source's pitch, or 0 if both are equal."""
        self._queue.copy(to, source, pieces.width, pieces.number, pieces.pitch, source_pitch or pieces.pitch)

    def _at(self, side: int, row: int, pieces: StridedPieces) -> int:
        """Return the address of a sequence's first piece in the block of `side`."""
        return self._blocks[side].address + pieces.start + row * pieces.step

    def _allocate(self) -> Block:
        return self._device.allocate(self._offsets[-1])


class Replaced(DevicePlacement):
    """States in two blocks, which steps read and write in turns. A state may be absent before the first step, or grow.

    A state without an axis of sequences is shared: it is reset only if all sequences are cleared or a state is put.
    """

    def _open(self, initial: Initial) -> None:
        super()._open(initial)
        self.grows = any(state.absent or state.rows is not None for state in self._states)
        self._start = tuple(start_shape(state) for state in self._states)
        self.shapes = [self._start, self._start]
        self._fresh = [0] * len(self._start)
        for i, (state, shape) in enumerate(zip(self._states, self._start, strict=True)):
            if shape is not None:
                start = start_of(state, initial[state.name].astype(np.dtype(state.dtype)))
                self._fresh[i] = self._keep(state.axes.one(np.broadcast_to(start, shape), 0))

    def after(self, program: Program) -> Shapes:
        return shapes_after(program, self._states)

    def take(self, row: int, fill: int, names: Collection[str] | None) -> dict[str, Array]:
        parts = self._parts(self.shapes[self._side])
        return self._fetch(self._side, row, {name: parts[name] for name in parts if names is None or name in names})

    def put(self, row: int, tensors: Arrays) -> None:
        """See `Placement`. If a shape changes, the states of all sequences are fetched, changed and written again."""
        side, parts = self._side, self._parts(self.shapes[self._side])
        tensor_shapes = {state.name: tensors[state.name].shape for state in self._states if state.name in tensors}
        if tensor_shapes == {name: pieces.shape for name, pieces in parts.items()}:
            self._send(side, row, parts, tensors)
            return
        whole = self._fetch(side, 0, self._parts(self.shapes[side], whole=True))
        before = [whole.get(state.name) for state in self._states]
        after = with_sequence(self._states, before, row, tensors, self._batch)
        shapes = tuple(None if array is None else array.shape for array in after)
        pairs = zip(self._states, after, strict=True)
        arrays = {state.name: array for state, array in pairs if array is not None}
        self._send(side, 0, self._parts(shapes, whole=True), arrays)
        self.shapes[side] = shapes

    def written(self, side: int) -> Iterable[tuple[StateTensor, Array]]:
        arrays = self._fetch(side, 0, self._parts(self.shapes[side], whole=True))
        return [(state, arrays[state.name]) for state in self._states if state.name in arrays]

    def _pieces(self, shapes: Shapes) -> Collection[StridedPieces]:
        return self._parts(shapes).values()

    def _parts(self, shapes: Shapes, whole: bool = False) -> dict[str, StridedPieces]:
        """Return the place of one sequence's part of each existing state; with `whole`, of all sequences together."""
        pieces = {}
        for i, (state, shape) in enumerate(zip(self._states, shapes, strict=True)):
            if shape is None:
                continue
            start, dtype, axis = self._offsets[i], self._types[i], state.batch_axis
            fresh, size = self._fresh[i] if shape == self._start[i] else 0, math.prod(shape) * dtype.itemsize
            assert size <= self._offsets[i + 1] - start, "more rows than the state has"
            if whole or axis is None:
                pieces[state.name] = StridedPieces(start, 0, size, 1, size, dtype, shape, fresh)
            else:
                before, behind = shape[:axis], shape[axis + 1 :]
                width, number, one = math.prod(behind) * dtype.itemsize, math.prod(before), (*before, *behind)
                pieces[state.name] = StridedPieces(start, width, width, number, width * self._batch, dtype, one, fresh)
        return pieces


class Rolled(DevicePlacement):
    """Memory rows in two blocks, written in turns, newest row last: with fill 2 and M 4, rows 2 and 3 hold data.

    All states have the same shape, with the axis of sequences first; rows are returned as float32.
    """

    def _open(self, initial: Initial) -> None:
        first = self._states[0]
        assert first.row_axis is not None
        self._dtype, self._axis = first.dtype, first.row_axis
        starts = [start_of(state, np.asarray(initial[state.name], np.float32)) for state in self._states]
        whole = [np.broadcast_to(from_float32(start, self._dtype), first.shape) for start in starts]
        self._fresh = np.stack([first.axes.one(array, 0) for array in whole])
        size = self._fresh[0].nbytes
        dtype, shape, fresh = self._types[0], self._fresh.shape, self._keep(self._fresh)
        self._part = StridedPieces(0, size, size, len(starts), self._offsets[1], dtype, shape, fresh)
        super()._open(initial)

    def take(self, row: int, fill: int, names: Collection[str] | None) -> dict[str, Array]:
        newest = self._rows(self._fetch(self._side, row, {"": self._part})[""])[:, self._slots(row, fill)]
        return {
            state.name: np.array(to_float32(rows, self._dtype), order="C")
            for state, rows in zip(self._states, newest, strict=True)
            if names is None or state.name in names
        }

    def put(self, row: int, tensors: Arrays) -> None:
        host = self._fresh.copy()
        for state, rows in zip(self._states, self._rows(host), strict=True):
            memory = tensors[state.name]
            rows[self._slots(row, len(memory))] = from_float32(memory, self._dtype)
        self._send(self._side, row, {"": self._part}, {"": host})

    def _pieces(self, shapes: Shapes) -> Collection[StridedPieces]:
        return (self._part,)

    def _slots(self, row: int, count: int) -> slice | Indices:
        """Return the slots of a sequence's newest `count` rows, oldest first."""
        slots = self._states[0].shape[self._axis]
        return slice(slots - count, slots)

    def _rows(self, host: Array) -> Array:
        """Return a view of one sequence's part, [states, ...], as [states, slots, ...]."""
        return np.moveaxis(host, self._axis, 1)


class Ring(Rolled):
    """Memory rows in one block, into which a step writes the segment's rows; spilled rows are copied on the device."""

    sides = 1

    def spill(self, row: int, count: int) -> None:
        """See `Placement`. Source and target cannot overlap, because count <= segment length < slots of the ring."""
        if not count:
            return
        _, heads, slots, *rest = self._states[0].shape
        slot, ring = math.prod(rest) * self._types[0].itemsize, self._counters.ring
        assert ring is not None
        with self._tail:
            for offset in self._offsets[:-1]:
                front = self._at(0, row, self._part) + offset
                self._queue.copy(front, front + ring * slot, count * slot, heads, slots * slot, slots * slot)

    def prepare_reorder(self, rows: Indices) -> None:
        if len(self._blocks) == self.sides and (rows != np.arange(len(rows))).any():
            self._blocks.append(self._allocate())  # a second block, from which `reorder` copies rows back

    def reorder(self, rows: Indices, side: int) -> None:
        """See `Placement`. Sequences that move are first copied to a second block, because two may exchange rows."""
        moves, pieces = [(row, old) for row, old in enumerate(rows.tolist()) if row != old], self._part
        self.prepare_reorder(rows)
        with self._tail:
            for old in {old for _, old in moves}:
                self._copy(self._at(1, old, pieces), self._at(0, old, pieces), pieces)
            for row, old in moves:
                self._copy(self._at(0, row, pieces), self._at(1, old, pieces), pieces)
            self._clear(0, range(len(rows), self._batch), ())

    def _slots(self, row: int, count: int) -> Indices:
        assert self._counters.ring is not None
        return ring_rows(int(self._counters.head[row]), count, self._counters.ring)


PLACEMENTS: dict[str, type[DevicePlacement]] = {"replace": Replaced, "rolled": Rolled, "ring": Ring}
"""Placement classes by update rule."""


def open_placements(
    device: Device,
    queue: Queue,
    tail: Tail,
    states: Sequence[StateTensor],
    initial: Initial,
    counters: SequenceCounters,
) -> tuple[DevicePlacement, ...]:
    """Return placements whose states have their first values."""
    alike = placed_alike(states, PLACEMENTS)
    return tuple(placement(device, queue, tail, some, initial, counters) for placement, some in alike)
