"""The memory of a loop on a device. Rows stand where `host.memory` has them; what is moved is said in bytes.

All states of a loop lie in one block, each at an aligned place, all of one shape: so the rows of one sequence, of all
states, are one copy with a pitch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import StateTensor
from txl_runtime.device.dtypes import from_float32, stored_type, to_float32
from txl_runtime.device.interface import Block, Device, Queue, aligned, host_address
from txl_runtime.streaming.memory import Counters, Initial, Tensors, ring_rows
from txl_runtime.types import Array, Floats, Indices

Addresses = Mapping[str, int]


class _Layout:
    """Where the states of B sequences stand in a block; `block` bytes in all."""

    def __init__(self, states: tuple[StateTensor, ...], batch: int) -> None:
        first = states[0] if states else None
        self.states, self.batch = states, batch
        self.names = [state.name for state in states]
        self.dtype: str = first.dtype if first is not None else "float32"
        self.row_shape = first.shape[1:] if first is not None else (0,)
        self.axis = first.axis - 1 if first is not None else 0  # of the memory rows, within one sequence
        self.row_bytes = int(np.prod(self.row_shape)) * stored_type(self.dtype).itemsize
        self.pitch = aligned(self.row_bytes * batch)
        self.block = self.pitch * len(states)

    def at(self, block: Block, row: int) -> int:
        """Where a sequence starts in the first state; in the others it does a pitch later each."""
        return block.address + row * self.row_bytes

    def places(self, block: Block) -> list[int]:
        return [block.address + index * self.pitch for index in range(len(self.states))]

    def host(self) -> Array:
        """One sequence of all states on the host, as stored: [states, ...]."""
        return np.zeros((len(self.states), *self.row_shape), stored_type(self.dtype))


class _DeviceStates(Tensors):
    """What both forms have in common: moving whole sequences between blocks and the host."""

    def __init__(
        self,
        device: Device,
        queue: Queue,
        states: tuple[StateTensor, ...],
        batch: int,
        fresh: Initial,
        counters: Counters,
    ) -> None:
        self._counters = counters
        self._device, self._queue, self._layout = device, queue, _Layout(states, batch)
        self._fresh = self._fresh_rows(fresh)
        # What a sequence is before anything was seen, where that is not zeros: kept on the device, to be copied.
        self._template = device.allocate(max(self._fresh.nbytes, 1)) if self._fresh.any() else None
        if self._template is not None:
            queue.copy(self._template.address, host_address(self._fresh), self._fresh.nbytes)
            queue.wait()

    def _fresh_rows(self, initial: Initial) -> Array:
        layout, fresh = self._layout, self._layout.host()
        for index, name in enumerate(layout.names):
            rows = np.moveaxis(fresh[index], layout.axis, 0)  # [slots, ...]
            rows[...] = from_float32(np.asarray(initial[name], np.float32), layout.dtype)
        return fresh

    def _between(self, to: int, to_pitch: int, source: int, source_pitch: int) -> None:
        """Copy one sequence of all states."""
        layout = self._layout
        if layout.states:
            self._queue.copy(to, source, layout.row_bytes, len(layout.states), to_pitch, source_pitch)

    def _fetch(self, block: Block, row: int) -> Array:
        """One sequence of all states, as stored: [states, ...]."""
        layout, host = self._layout, self._layout.host()
        self._between(host_address(host), layout.row_bytes, layout.at(block, row), layout.pitch)
        self._queue.wait()
        return host

    def _send(self, block: Block, row: int, host: Array) -> None:
        layout = self._layout
        self._between(layout.at(block, row), layout.pitch, host_address(host), layout.row_bytes)
        self._queue.wait()  # the array is the caller's, who may let go of it

    def _clear(self, block: Block, rows: Indices) -> None:
        layout = self._layout
        if not layout.states:
            return
        if self._template is None and len(rows) == layout.batch:
            self._queue.zero(block.address, layout.block)
            return
        for row in rows.tolist():
            if self._template is None:
                self._queue.zero(layout.at(block, row), layout.row_bytes, len(layout.states), layout.pitch)
            else:
                self._between(layout.at(block, row), layout.pitch, self._template.address, layout.row_bytes)

    def _take(self, host: Array, slots: Any, names: Collection[str] | None) -> dict[str, Floats]:
        """Some slots of a fetched sequence, [count, ...] per state: of all states, or of those named."""
        layout = self._layout
        rows = np.moveaxis(host, layout.axis + 1, 1)[:, slots]
        return {
            name: np.array(to_float32(rows[index], layout.dtype), order="C")
            for index, name in enumerate(layout.names)
            if names is None or name in names
        }

    def _made(self, slots: Any, rows: Mapping[str, Floats]) -> Array:
        """A fresh sequence with some slots set, to be sent."""
        layout, host = self._layout, self._fresh.copy()
        for index, name in enumerate(layout.names):
            np.moveaxis(host[index], layout.axis, 0)[slots] = from_float32(rows[name], layout.dtype)
        return host


class DeviceRolled(_DeviceStates):
    """Two blocks that a program reads and writes in turn; filled rows stand last. See `host.memory.RolledMemory`."""

    def __init__(self, device: Device, queue: Queue, manifest: Manifest, initial: Initial, counters: Counters) -> None:
        super().__init__(device, queue, manifest.states_of("rolled"), manifest.batch_size, initial, counters)
        self._blocks = tuple(device.allocate(max(self._layout.block, 1)) for _ in range(2))

    def addresses(self, side: int) -> tuple[Addresses, Addresses]:
        """What to bind as a program's inputs and outputs; names are the graph's. Only rolled memory has sides."""
        states, layout = self._layout.states, self._layout
        now, after = layout.places(self._blocks[side]), layout.places(self._blocks[1 - side])
        inputs = {state.input: place for state, place in zip(states, now, strict=True)}
        return inputs, {state.output: place for state, place in zip(states, after, strict=True)}

    def newest(self, row: int, count: int, names: Collection[str] | None = None) -> dict[str, Floats]:
        slots = self._layout.row_shape[self._layout.axis]
        return self._take(self._fetch(self._blocks[self._counters.side], row), slice(slots - count, slots), names)

    def place(self, row: int, rows: Mapping[str, Floats]) -> None:
        if self._layout.states:
            slots, count = self._layout.row_shape[self._layout.axis], len(next(iter(rows.values())))
            self._send(self._blocks[self._counters.side], row, self._made(slice(slots - count, slots), rows))

    def clear(self, rows: Indices) -> None:
        """Make sequences what they are before anything was seen; the other side is written by the next step."""
        self._clear(self._blocks[self._counters.side], rows)

    def reorder(self, rows: Indices) -> None:
        """Sequence i becomes what sequence rows[i] was, on the other side; those behind the last are cleared."""
        layout, now, after = self._layout, self._blocks[self._counters.side], self._blocks[1 - self._counters.side]
        for row, old in enumerate(rows.tolist()):
            self._between(layout.at(after, row), layout.pitch, layout.at(now, old), layout.pitch)
        self._counters.turn()
        self._clear(after, np.arange(len(rows), layout.batch))


class DeviceRing(_DeviceStates):
    """One block, which programs update in place; spilled rows are moved on the device. See `host.memory.RingMemory`."""

    def __init__(self, device: Device, queue: Queue, manifest: Manifest, initial: Initial, counters: Counters) -> None:
        states = manifest.states_of("ring")
        super().__init__(device, queue, states, manifest.batch_size, initial, counters)
        assert states[0].slots is not None
        self._ring = states[0].slots
        self._block = device.allocate(self._layout.block)
        self._spare: Block | None = None  # what `reorder` takes its sequences from

    def addresses(self, side: int) -> tuple[Addresses, Addresses]:
        """See `DeviceRolled`."""
        places = self._layout.places(self._block)
        pairs = list(zip(self._layout.states, places, strict=True))
        return {state.input: place for state, place in pairs}, {state.output: place for state, place in pairs}

    def move_to_front(self, row: int, count: int) -> None:
        """See `DeviceRolled`; the two ranges cannot overlap, count is at most L < ring."""
        heads, slots, *rest = self._layout.row_shape
        slot = int(np.prod(rest)) * stored_type(self._layout.dtype).itemsize
        for index in range(len(self._layout.states)):
            front = self._layout.at(self._block, row) + index * self._layout.pitch
            self._queue.copy(front, front + self._ring * slot, count * slot, heads, slots * slot, slots * slot)

    def newest(self, row: int, count: int, names: Collection[str] | None = None) -> dict[str, Floats]:
        slots = ring_rows(int(self._counters.head[row]), count, self._ring)
        return self._take(self._fetch(self._block, row), slots, names)

    def place(self, row: int, rows: Mapping[str, Floats]) -> None:
        slots = ring_rows(int(self._counters.head[row]), len(next(iter(rows.values()))), self._ring)
        self._send(self._block, row, self._made(slots, rows))

    def clear(self, rows: Indices) -> None:
        self._clear(self._block, rows)

    def reorder(self, rows: Indices) -> None:
        """See `DeviceRolled`: sequences that move are set aside first, since they may change places with each other."""
        layout = self._layout
        moving = [(row, old) for row, old in enumerate(rows.tolist()) if row != old]
        if moving:
            if self._spare is None:
                self._spare = self._device.allocate(layout.block)
            for old in {old for _, old in moving}:
                self._between(layout.at(self._spare, old), layout.pitch, layout.at(self._block, old), layout.pitch)
            for row, old in moving:
                self._between(layout.at(self._block, row), layout.pitch, layout.at(self._spare, old), layout.pitch)
        self.clear(np.arange(len(rows), layout.batch))


DeviceMemory: TypeAlias = DeviceRolled | DeviceRing


def open_device_memory(
    update: str, device: Device, queue: Queue, manifest: Manifest, initial: Initial, counters: Counters
) -> DeviceMemory:
    """Fresh memory of an update rule, on a device."""
    kind = DeviceRing if update == "ring" else DeviceRolled
    return kind(device, queue, manifest, initial, counters)
