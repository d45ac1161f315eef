"""Page-locked host memory through which results are fetched; at most 64 MiB, whatever the size of the results.

A result that fits is fetched together with its step, and is read in place. A larger result stays on the device until it
is read, and is then copied in pieces, through two alternating buffers, into ordinary memory.
"""

from __future__ import annotations

import numpy as np

from txl_runtime.device.blocks import Part, Raw
from txl_runtime.device.cuda import Device, Event, Queue
from txl_runtime.device.interface import host_address
from txl_runtime.device.tail import Tail
from txl_runtime.types import Array

PIECE = 4 * 2**20
"""Maximum size of each of the two buffers in bytes, 4 MiB."""
LARGEST = 64 * 2**20 - 2 * PIECE
"""Maximum number of bytes of results that are fetched with their step; with the buffers a loop takes at most 64 MiB."""
SMALLEST = 4096
"""Minimum size of an allocation in bytes."""


class Staging:
    """The page-locked memory of one loop. Results in it are valid until the loop's next step.

    Attributes:
        arrived: the array in which results arrive that are fetched with their step.
    """

    def __init__(self, device: Device, queue: Queue, tail: Tail) -> None:
        self._device, self._queue, self._tail = device, queue, tail
        self.arrived: Raw = np.empty(0, np.uint8)
        self._buffers: tuple[Raw, ...] = ()
        self._events: tuple[Event, ...] = ()

    def fits(self, size: int) -> bool:
        """Return whether results of `size` bytes in all may be fetched with a step."""
        return size <= LARGEST

    def grow(self, size: int) -> bool:
        """Make `arrived` at least `size` bytes long; return True if it is a new array. No work may be unfinished."""
        if size <= len(self.arrived):
            return False
        self.arrived = self._device.staging(min(LARGEST, max(SMALLEST, 1 << (size - 1).bit_length())))
        return True

    def open_buffers(self, size: int) -> None:
        """Allocate the buffers that `bring` needs for parts of `size` bytes, before the step, so that it
        cannot fail.
        """
        if not self._events:
            self._events = self._device.event(), self._device.event()
        if not self._buffers or len(self._buffers[0]) < min(size, PIECE):
            size = min(PIECE, max(SMALLEST, 1 << (size - 1).bit_length()))
            self._buffers = self._device.staging(size), self._device.staging(size)

    def bring(self, part: Part) -> Array:
        """Return a copy of a part of a result after its step is done; `open_buffers` must be called before the step.

        For example, the part [:4] of a result float32 [8, 256] is returned as float32 [4, 256].

        Raises:
            BackendError: CUDA failed.
        """
        raw = np.empty(part.size, np.uint8)
        if not part.size:
            return part.view(raw)
        before: tuple[int, int, int] | None = None
        for number, (start, address, width, rows) in enumerate(part.pieces(PIECE)):
            which = number % 2
            with self._tail.lock, self._tail:
                self._queue.fetch(host_address(self._buffers[which]), address, width, rows, width, part.pitch)
                self._queue.record(self._events[which])
            if before is not None:
                self._take(raw, *before)
            before = which, start, width * rows
        assert before is not None
        self._take(raw, *before)
        return part.view(raw)

    def _take(self, raw: Raw, which: int, start: int, size: int) -> None:
        """Wait for a piece to arrive in its buffer, and copy it to `raw`."""
        with self._device.current():
            self._events[which].wait()
        raw[start : start + size] = self._buffers[which][:size]
