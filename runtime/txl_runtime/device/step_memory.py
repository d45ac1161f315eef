"""The states of a step on a device, of any types and shapes, in two blocks that steps read and write in turns.

A state has the same place in both blocks, with room for the largest shape that it can have: however its rows grow, it
starts there. Of a state [pre, B, post], what belongs to one sequence is `pre` pieces of `post` values, B times as far
apart: one copy with a pitch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from txl_runtime.bundle.tables import Program, StateTensor
from txl_runtime.device.cuda import Block, Device, Queue
from txl_runtime.device.dtypes import stored_type
from txl_runtime.device.interface import aligned, host_address
from txl_runtime.device.tail import Tail
from txl_runtime.streaming.steps import Shape, Shapes
from txl_runtime.types import Array

Addresses = Mapping[str, int]


class _Pieces(NamedTuple):
    """Where the part of one sequence lies in a state: so many pieces of so many bytes, so far apart."""

    number: int
    width: int
    pitch: int


class StepMemory:
    """Moves states between blocks and the host; which side is held, and in which shapes, the loop says.

    Args:
        device, queue: where the blocks lie, and the order of all work on them.
        tail: all that is put into the queue is put in by `with tail`. Everything is for whoever has the lock.
        states: the table.
        starts: what each state is before anything was seen, of all sequences; None for one that is absent.
        batch_size: B.
    """

    def __init__(
        self,
        device: Device,
        queue: Queue,
        tail: Tail,
        states: Sequence[StateTensor],
        starts: Sequence[Array | None],
        batch_size: int,
    ) -> None:
        self._queue, self._tail, self._states, self._batch = queue, tail, states, batch_size
        self._types = [stored_type(state.dtype) for state in states]
        sizes = [
            aligned(math.prod(state.shape) * dtype.itemsize) for state, dtype in zip(states, self._types, strict=True)
        ]
        self._offsets = [0, *accumulate(sizes)]
        self._blocks = tuple(device.allocate(max(self._offsets[-1], 1)) for _ in range(2))
        self._starts = [None if start is None else start.shape for start in starts]
        # What one sequence starts as, where that is not zeros: kept on the device, to be copied.
        self._templates = [self._template(device, index, start) for index, start in enumerate(starts)]

    def addresses(self, program: Program, side: int) -> tuple[Addresses, Addresses]:
        """What to bind as a program's inputs and outputs, if one side is held; names are the graph's."""
        taken = {spec.name for spec in program.inputs}
        inputs = {s.input: self._at(side, index) for index, s in enumerate(self._states) if s.input in taken}
        return inputs, {s.output: self._at(1 - side, index) for index, s in enumerate(self._states)}

    def begin(self, side: int) -> None:
        """Make all states what they are before anything was seen."""
        with self._tail:
            for index, shape in enumerate(self._starts):
                if shape is None:
                    continue
                if self._templates[index] is None:
                    self._queue.zero(self._at(side, index), self._bytes(index, shape))
                    continue
                for row in range(1 if self._states[index].batch_axis is None else self._batch):
                    self._start(side, index, row, shape)

    def clear(self, side: int, row: int, shapes: Shapes) -> None:
        """Make one sequence what it is before anything was seen; zeros in states that have other shapes by now."""
        with self._tail:
            self._clear(side, row, shapes)

    def _clear(self, side: int, row: int, shapes: Shapes) -> None:
        for index, shape in enumerate(shapes):
            if shape is not None and self._states[index].batch_axis is not None:
                self._start(side, index, row, shape)

    def reorder(self, side: int, rows: Sequence[int], shapes: Shapes) -> None:
        """Write to the other side: sequence i becomes what rows[i] was, those behind the last are cleared."""
        with self._tail:
            for index, shape in enumerate(shapes):
                if shape is None:
                    continue
                if self._states[index].batch_axis is None:
                    self._copy(self._at(1 - side, index), self._at(side, index), self._pieces(index, shape))
                    continue
                for row, old in enumerate(rows):
                    pieces = self._pieces(index, shape)
                    after, now = (self._at(1 - side, index, shape, row), self._at(side, index, shape, old))
                    self._copy(after, now, pieces, pieces.pitch, pieces.pitch)
            for row in range(len(rows), self._batch):
                self._clear(1 - side, row, shapes)

    def take(self, side: int, row: int, shapes: Shapes, names: Collection[str] | None = None) -> dict[str, Array]:
        """Copies of one sequence's tensors, and of those that are shared; of all that there are, or of those named."""
        taken = {}
        with self._tail:
            for index, shape in enumerate(shapes):
                state = self._states[index]
                if shape is not None and (names is None or state.name in names):
                    pieces, host = self._pieces(index, shape), self._host(index, self.sequence_shape(index, shape))
                    place = self._at(side, index, shape, row)
                    self._queue.fetch(
                        host_address(host), place, pieces.width, pieces.number, pieces.width, pieces.pitch
                    )
                    taken[state.name] = host
        self._tail.wait()
        return taken

    def put(self, side: int, row: int, shapes: Shapes, tensors: Mapping[str, Array]) -> None:
        """Write tensors that were taken; they have to be of the shapes that are held."""
        kept = []
        with self._tail:
            for index, shape in enumerate(shapes):
                if shape is not None:
                    host = np.ascontiguousarray(tensors[self._states[index].name], self._types[index])
                    kept.append(host)
                    pieces, place = self._pieces(index, shape), self._at(side, index, shape, row)
                    self._queue.send(place, host_address(host), pieces.width, pieces.number, pieces.pitch, pieces.width)
        self._tail.wait()  # before the arrays on the host go

    def read(self, side: int, shapes: Shapes) -> list[Array | None]:
        """Copies of all states, whole."""
        arrays = [None if shape is None else self._host(index, shape) for index, shape in enumerate(shapes)]
        with self._tail:
            for index, array in enumerate(arrays):
                if array is not None and array.size:
                    self._queue.fetch(host_address(array), self._at(side, index), array.nbytes)
        self._tail.wait()
        return arrays

    def write(self, side: int, arrays: Sequence[Array | None]) -> None:
        """Write all states, whole."""
        kept = []
        with self._tail:
            for index, array in enumerate(arrays):
                if array is not None and array.size:
                    host = np.ascontiguousarray(array, self._types[index])
                    assert host.nbytes <= self._offsets[index + 1] - self._offsets[index], (
                        "more rows than the state has"
                    )
                    kept.append(host)
                    self._queue.send(self._at(side, index), host_address(host), host.nbytes)
        self._tail.wait()  # before the arrays on the host go

    def sequence_shape(self, index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What one sequence has of a state of some shape; all of a state that is shared."""
        axis = self._states[index].batch_axis
        return shape if axis is None else (*shape[:axis], *shape[axis + 1 :])

    def _template(self, device: Device, index: int, start: Array | None) -> Block | None:
        if start is None or not start.size:
            return None
        axis = self._states[index].batch_axis
        one = np.ascontiguousarray(start if axis is None else start.take(0, axis), self._types[index])
        if not any(one.tobytes()):
            return None
        block = device.allocate(one.nbytes)
        with self._tail:
            self._queue.send(block.address, host_address(one), one.nbytes)
        self._tail.wait()
        return block

    def _start(self, side: int, index: int, row: int, shape: tuple[int, ...]) -> None:
        """Make a sequence's part of one state, or one that is shared, what it starts as."""
        pieces, place = self._pieces(index, shape), self._at(side, index, shape, row)
        template = self._templates[index] if shape == self._starts[index] else None
        if template is not None:
            self._copy(place, template.address, pieces, pieces.pitch, pieces.width)
        elif pieces.number and pieces.width:
            self._queue.zero(place, pieces.width, pieces.number, pieces.pitch)

    def _pieces(self, index: int, shape: tuple[int, ...]) -> _Pieces:
        axis, size = self._states[index].batch_axis, self._types[index].itemsize
        if axis is None:
            width = size * math.prod(shape)
            return _Pieces(1, width, width)
        width = size * math.prod(shape[axis + 1 :])
        return _Pieces(math.prod(shape[:axis]), width, width * self._batch)

    def _at(self, side: int, index: int, shape: Shape = None, row: int = 0) -> int:
        """Where a state starts; with a shape, where a sequence's first piece does."""
        place = self._blocks[side].address + self._offsets[index]
        if shape is None or self._states[index].batch_axis is None:
            return place
        return place + row * self._pieces(index, shape).width

    def _bytes(self, index: int, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * self._types[index].itemsize

    def _host(self, index: int, shape: tuple[int, ...]) -> Array:
        return np.zeros(shape, self._types[index])

    def _copy(self, to: int, source: int, pieces: _Pieces, to_pitch: int = 0, source_pitch: int = 0) -> None:
        """Within the device."""
        if pieces.number and pieces.width:
            self._queue.copy(to, source, pieces.width, pieces.number, to_pitch, source_pitch)
