"""The memory of a loop on a device. Rows stand where `host.memory` has them; what is moved is said in bytes.

All states of a loop lie in one block, each at an aligned place, all of one shape: so the rows of one sequence, of all
states, are one copy with a pitch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.device.cuda import Block, Device, Queue
from txl_runtime.device.dtypes import from_float32, stored_type, to_float32
from txl_runtime.device.interface import aligned, host_address
from txl_runtime.device.tail import Tail
from txl_runtime.streaming.memory import Counters, Tensors, ring_rows
from txl_runtime.streaming.state import Initial
from txl_runtime.types import Array, Floats, Indices

Addresses = Mapping[str, int]


class DeviceMemory(Tensors):
    """What both forms have in common: blocks of states, and moving whole sequences between blocks and the host.

    Everything is for whoever has the lock. All that is put into the queue is put in by `with tail`.
    """

    update: str
    blocks: int

    def __init__(
        self, device: Device, queue: Queue, manifest: Manifest, initial: Initial, counters: Counters, tail: Tail
    ) -> None:
        self._device, self._queue, self._counters, self._tail = device, queue, counters, tail
        self._states, self._batch = manifest.states_of(self.update), manifest.batch_size
        first = self._states[0] if self._states else None
        self._dtype: str = first.dtype if first is not None else "float32"
        self._row_shape = first.shape[1:] if first is not None else (0,)
        axis = first.row_axis if first is not None else 1
        assert axis is not None
        self._axis = axis  # of the memory rows, in [states, ...] of one sequence
        self._row_bytes = int(np.prod(self._row_shape)) * stored_type(self._dtype).itemsize
        self._pitch = aligned(self._row_bytes * self._batch)  # from one state to the next
        self._fresh = np.zeros((len(self._states), *self._row_shape), stored_type(self._dtype))
        for rows, state in zip(self._rows(self._fresh), self._states, strict=True):
            rows[...] = from_float32(np.asarray(initial[state.name], np.float32), self._dtype)
        # What a sequence is before anything was seen, where that is not zeros: kept on the device, to be copied.
        self._template = device.allocate(max(self._fresh.nbytes, 1)) if self._fresh.any() else None
        if self._template is not None:
            with tail:
                queue.send(self._template.address, host_address(self._fresh), self._fresh.nbytes)
            tail.wait()
        self._blocks = tuple(self._allocate() for _ in range(self.blocks))

    def addresses(self, side: int) -> tuple[Addresses, Addresses]:
        """What to bind as a program's inputs and outputs; names are the graph's. Only rolled memory has sides."""
        now, after = self._blocks[side], self._blocks[(side + 1) % self.blocks]
        offsets = [(state, index * self._pitch) for index, state in enumerate(self._states)]
        inputs = {state.input: now.address + offset for state, offset in offsets}
        return inputs, {state.output: after.address + offset for state, offset in offsets}

    def newest(self, row: int, count: int, names: Collection[str] | None = None) -> dict[str, Floats]:
        host = np.zeros_like(self._fresh)
        if host.size:
            at, states = self._at(self._now, row), len(self._states)
            with self._tail:
                self._queue.fetch(host_address(host), at, self._row_bytes, states, self._row_bytes, self._pitch)
            self._tail.wait()
        newest = self._rows(host)[:, self._slots(row, count)]
        return {
            state.name: np.array(to_float32(rows, self._dtype), order="C")
            for rows, state in zip(newest, self._states, strict=True)
            if names is None or state.name in names
        }

    def place(self, row: int, rows: Mapping[str, Floats]) -> None:
        host = self._fresh.copy()
        for slots, state in zip(self._rows(host), self._states, strict=True):
            given = rows[state.name]
            slots[self._slots(row, len(given))] = from_float32(given, self._dtype)
        if host.size:
            at, states = self._at(self._now, row), len(self._states)
            with self._tail:
                self._queue.send(at, host_address(host), self._row_bytes, states, self._pitch, self._row_bytes)
            self._tail.wait()  # before the array on the host goes

    def clear(self, rows: Indices) -> None:
        """Make sequences what they are before anything was seen; another side is written by the next step."""
        if self._states:
            with self._tail:
                self._clear(rows)

    def _clear(self, rows: Indices) -> None:
        if self._template is None and len(rows) == self._batch:
            self._queue.zero(self._now.address, self._pitch * len(self._states))
            rows = rows[:0]
        for row in rows.tolist():
            place = self._at(self._now, row)
            if self._template is None:
                self._queue.zero(place, self._row_bytes, len(self._states), self._pitch)
            else:
                self._copy(place, self._pitch, self._template.address, self._row_bytes)

    def prepare_reorder(self, rows: Indices) -> None:
        """See `Loop`; where there are two blocks, there is room."""
        return

    @property
    def _now(self) -> Block:
        return self._blocks[self._counters.side]

    @abstractmethod
    def _slots(self, row: int, count: int) -> slice | Indices:
        """Where the newest rows of a sequence stand."""

    def _rows(self, host: Array) -> Array:
        """A view of one sequence of all states [states, ...] as [states, slots, ...]."""
        return np.moveaxis(host, self._axis, 1)

    def _allocate(self) -> Block:
        return self._device.allocate(max(self._pitch * len(self._states), 1))

    def _at(self, block: Block, row: int) -> int:
        """Where a sequence starts in the first state; in the others it does a pitch later each."""
        return block.address + row * self._row_bytes

    def _copy(self, to: int, to_pitch: int, source: int, source_pitch: int) -> None:
        """Copy one sequence of all states within the device."""
        if self._states:
            self._queue.copy(to, source, self._row_bytes, len(self._states), to_pitch, source_pitch)


class DeviceRolled(DeviceMemory):
    """Two blocks that a program reads and writes in turn; filled rows stand last. See `host.memory.RolledMemory`."""

    update, blocks = "rolled", 2

    def _slots(self, row: int, count: int) -> slice:
        slots = self._row_shape[self._axis - 1]
        return slice(slots - count, slots)

    def reorder(self, rows: Indices) -> None:
        """Sequence i becomes what sequence rows[i] was, on the other side; those behind the last are cleared."""
        now, after = self._now, self._blocks[1 - self._counters.side]
        with self._tail:
            for row, old in enumerate(rows.tolist()):
                self._copy(self._at(after, row), self._pitch, self._at(now, old), self._pitch)
        self._counters.turn()
        self.clear(np.arange(len(rows), self._batch))


class DeviceRing(DeviceMemory):
    """One block, which programs update in place; spilled rows are moved on the device. See `host.memory.RingMemory`."""

    update, blocks = "ring", 1

    def __init__(
        self, device: Device, queue: Queue, manifest: Manifest, initial: Initial, counters: Counters, tail: Tail
    ) -> None:
        super().__init__(device, queue, manifest, initial, counters, tail)
        assert self._states[0].slots is not None
        self._ring = self._states[0].slots
        self._spare: Block | None = None  # what `reorder` takes its sequences from

    def _slots(self, row: int, count: int) -> Indices:
        return ring_rows(int(self._counters.head[row]), count, self._ring)

    def move_to_front(self, row: int, count: int) -> None:
        """The two ranges cannot overlap, count is at most L < ring."""
        if not count:
            return
        heads, slots, *rest = self._row_shape
        slot = int(np.prod(rest)) * stored_type(self._dtype).itemsize
        with self._tail:
            for index in range(len(self._states)):
                front = self._at(self._now, row) + index * self._pitch
                self._queue.copy(front, front + self._ring * slot, count * slot, heads, slots * slot, slots * slot)

    def prepare_reorder(self, rows: Indices) -> None:
        if self._spare is None and (rows != np.arange(len(rows))).any():
            self._spare = self._allocate()

    def reorder(self, rows: Indices) -> None:
        """As `DeviceRolled.reorder`; what moves is set aside first, since sequences may change places."""
        moving = [(row, old) for row, old in enumerate(rows.tolist()) if row != old]
        self.prepare_reorder(rows)
        if (spare := self._spare) is not None:
            with self._tail:
                for old in {old for _, old in moving}:
                    self._copy(self._at(spare, old), self._pitch, self._at(self._now, old), self._pitch)
                for row, old in moving:
                    self._copy(self._at(self._now, row), self._pitch, self._at(spare, old), self._pitch)
        self.clear(np.arange(len(rows), self._batch))
