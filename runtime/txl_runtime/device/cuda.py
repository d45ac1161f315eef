"""A device with its memory, queues of work, events and recorded work, as loops use them through CUDA's driver.

Addresses are plain integers. The device does a queue's work in order, while the host goes on; only `Event.wait`,
`Queue.wait` and allocations wait for the device. A caller of a queue's or an event's method must first enter the device
with `Device.current`; the device's own methods enter it themselves.

Host memory that is passed to `send` and `fetch` must not change until the copy is done: page-locked memory
(`Device.staging`) is accessed when the queue reaches the copy; other memory may be read before `send` returns.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache

import numpy as np
from numpy.typing import NDArray

from txl_runtime.device.cuda_context import Context, Current
from txl_runtime.device.driver import DEVICE, EVENTS, HOST, NON_BLOCKING, RELAXED, Driver, Memcpy2D, open_driver
from txl_runtime.device.gpu import INTEGRATED, device_number, device_title
from txl_runtime.errors import BackendError

Work = Callable[[], None]
"""A function that puts work into a queue."""
MEMORY_KHZ, MEMORY_BITS = 36, 37
"""CUDA's numbers of CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE and _GLOBAL_MEMORY_BUS_WIDTH."""
WIDEST = 2**31 - 1
"""CU_DEVICE_ATTRIBUTE_MAX_PITCH in bytes, the same on all GPUs so far: rows with a larger pitch are copied
one by one.
"""


class Block:
    """Zeroed memory on the device, freed when this object is collected.

    Attributes:
        address: device address of the first byte, a multiple of 256.
        size: number of bytes.
    """

    def __init__(self, context: Context, size: int, queue: Queue) -> None:
        self.size = max(size, 1)
        self.address = _own(self, context, "cuMemAlloc_v2", "cuMemFree_v2", self.size, kind=ctypes.c_uint64)
        # Wait only for this queue: waiting for the whole device would break a record that a second thread is making.
        try:
            with context.driver.beside_records():
                queue.zero(self.address, self.size)
                queue.wait()
        except BaseException:
            queue.settle()  # the memory is freed after an interrupt, so the work that writes it must end first
            raise


class Event:
    """A marker in a queue's work, which `Queue.record` may set again and again.

    Attributes:
        handle: CUDA's handle.
    """

    def __init__(self, context: Context, flags: int) -> None:
        self.handle = _own(self, context, "cuEventCreate", "cuEventDestroy_v2", flags)
        self._synchronize = context.driver.cuEventSynchronize

    def wait(self) -> None:
        """Wait until the work before the marker's latest place is done; return at once if the marker was never set."""
        self._synchronize(self.handle)


class Queue:
    """An ordered queue of work on the device. CUDA calls it a stream, but `Stream` has a different meaning in this
    project.

    Rows of `send`, `fetch`, `copy` and `zero` have `width` bytes; a pitch is the distance from one row to the next.

    Attributes:
        handle: CUDA's handle, for engines.
    """

    def __init__(self, context: Context) -> None:
        self.handle = _own(self, context, "cuStreamCreate", "cuStreamDestroy_v2", NON_BLOCKING)
        driver = self._driver = context.driver
        self._context = context
        self._send, self._fetch = driver.cuMemcpyHtoDAsync_v2, driver.cuMemcpyDtoHAsync_v2
        self._copy, self._copy_rows = driver.cuMemcpyDtoDAsync_v2, driver.cuMemcpy2DAsync_v2
        self._record, self._synchronize = driver.cuEventRecord, driver.cuStreamSynchronize

    def send(
        self, to_device: int, from_host: int, width: int, rows: int = 1, to_pitch: int = 0, from_pitch: int = 0
    ) -> None:
        """Copy rows from the host to the device."""
        if rows == 1 and width > 0:
            self._send(to_device, from_host, width, self.handle)
        else:
            self._rows(DEVICE, to_device, HOST, from_host, width, rows, to_pitch, from_pitch)

    def fetch(
        self, to_host: int, from_device: int, width: int, rows: int = 1, to_pitch: int = 0, from_pitch: int = 0
    ) -> None:
        """Copy rows from the device to the host."""
        if rows == 1 and width > 0:
            self._fetch(to_host, from_device, width, self.handle)
        else:
            self._rows(HOST, to_host, DEVICE, from_device, width, rows, to_pitch, from_pitch)

    def copy(
        self, to_device: int, from_device: int, width: int, rows: int = 1, to_pitch: int = 0, from_pitch: int = 0
    ) -> None:
        """Copy rows within the device; source and target must not overlap."""
        if rows == 1 and width > 0:
            self._copy(to_device, from_device, width, self.handle)
        else:
            self._rows(DEVICE, to_device, DEVICE, from_device, width, rows, to_pitch, from_pitch)

    def _rows(
        self, to_kind: int, to: int, from_kind: int, source: int, width: int, rows: int, to_pitch: int, from_pitch: int
    ) -> None:
        if width <= 0 or rows <= 0:
            return
        if max(to_pitch, from_pitch) > WIDEST:
            single = {(DEVICE, HOST): self.send, (HOST, DEVICE): self.fetch, (DEVICE, DEVICE): self.copy}
            for row in range(rows):
                single[to_kind, from_kind](to + row * to_pitch, source + row * from_pitch, width)
            return
        source_fields = (0, 0, from_kind, *_places(from_kind, source), None, from_pitch)
        target_fields = (0, 0, to_kind, *_places(to_kind, to), None, to_pitch)
        self._copy_rows(ctypes.byref(Memcpy2D(*source_fields, *target_fields, width, rows)), self.handle)

    def zero(self, to: int, width: int, rows: int = 1, pitch: int = 0) -> None:
        """Set rows of bytes on the device to 0."""
        if width <= 0 or rows <= 0:
            return
        if rows == 1 or pitch == width:  # one contiguous piece, which may have any size
            self._driver.cuMemsetD8Async(to, 0, width * rows, self.handle)
        elif pitch > WIDEST:
            for row in range(rows):
                self.zero(to + row * pitch, width)
        else:
            self._driver.cuMemsetD2D8Async(to, pitch, 0, width, rows, self.handle)

    def record(self, event: Event) -> None:
        """Set an event's marker behind all work that the queue has been given so far."""
        self._record(event.handle, self.handle)

    def wait(self) -> None:
        """Wait until all work of the queue is done."""
        self._synchronize(self.handle)

    def settle(self) -> None:
        """After an error, wait for all work and ignore further failures."""
        self._context.quietly("cuStreamSynchronize", self.handle)

    def beside_records(self) -> AbstractContextManager[None]:
        """Return a context in which an engine may allocate while other libraries record; see `Driver`."""
        return self._driver.beside_records()

    def recording(self) -> bool:
        """Return whether the queue is recording work instead of doing it; False if CUDA's call fails."""
        state = ctypes.c_int()
        self._driver.quietly("cuStreamIsCapturing", self.handle, ctypes.byref(state))
        return bool(state.value)

    def capture(self, work: Work) -> Work:
        """Record the work that `work` puts into the queue, without doing it; return a function that replays it.

        If `work` raises an exception, recording ends and the exception is passed on.

        Raises:
            BackendError: some of the work cannot be recorded.
        """
        driver, graph = self._driver, ctypes.c_void_p()
        try:
            # The mode is relaxed; in any other mode, memory that a second thread frees would invalidate the record.
            driver.cuStreamBeginCapture_v2(self.handle, RELAXED)
            work()
            driver.cuStreamEndCapture(self.handle, ctypes.byref(graph))
            return _Replay(self._context, graph.value, self, work)
        except BaseException:
            self._stop_recording(graph)
            raise
        finally:
            if graph.value:
                driver.quietly("cuGraphDestroy", graph.value)

    def _stop_recording(self, graph: ctypes.c_void_p) -> None:
        """End a failed recording, if it has not ended; `graph` receives the unfinished graph."""
        if self.recording():
            self._driver.quietly("cuStreamEndCapture", self.handle, ctypes.byref(graph))


class _Replay:
    """A replay of recorded work, which keeps the queue and the work alive, and thereby the engine's memory."""

    def __init__(self, context: Context, graph: int | None, queue: Queue, work: Work) -> None:
        self._graph = _own(self, context, "cuGraphInstantiateWithFlags", "cuGraphExecDestroy", graph, 0)
        self._launch, self._stream, self._held = context.driver.cuGraphLaunch, queue.handle, (queue, work)

    def __call__(self) -> None:
        self._launch(self._graph, self._stream)


class Device:
    """A GPU with its primary CUDA context, which all libraries of the process share.

    Attributes:
        title: name of the GPU, for people.
        ordinal: index among the visible GPUs.
    """

    def __init__(self, driver: Driver, ordinal: int = 0) -> None:
        count = ctypes.c_int()
        driver.cuDeviceGetCount(ctypes.byref(count))
        if count.value <= ordinal:
            raise BackendError(
                f"CUDA sees {count.value} devices, expected GPU {ordinal}; look at CUDA_VISIBLE_DEVICES, or use "
                "--backend cpu"
            )
        self.title = device_title(driver, ordinal)
        if count.value > 1:
            self.title += f" (GPU {ordinal} of the {count.value} that are visible)"
        self.ordinal = ordinal
        # A wait for an event spins, which is faster. On an integrated board, which has few cores, a wait sleeps
        # instead.
        self._flags = EVENTS[device_number(driver, ordinal, INTEGRATED) != 0]
        self._context = Context(driver, ordinal)
        with self.current():
            self._zeroing = Queue(self._context)

    def current(self) -> Current:
        """Return a context in which this device is the thread's current device; at its end the previous device is
        restored.

        Raises:
            BackendError: raised on entry, in a process that was forked from the process that opened the device.
        """
        return Current(self._context)

    def bandwidth(self) -> float | None:
        """Return the memory bandwidth in GB/s from the driver's figures; None if there are none, or the GPU is
        integrated.

        On a Jetson, whose GPU is integrated, the driver's figures are wrong.
        """
        driver, ordinal = self._context.driver, self.ordinal
        try:
            numbers = [device_number(driver, ordinal, number) for number in (INTEGRATED, MEMORY_KHZ, MEMORY_BITS)]
        except BackendError:
            return None
        shared, khz, bits = numbers
        return None if shared else 2 * khz * bits / 8e6 or None  # double data rate: two bits per clock and line

    def allocate(self, size: int) -> Block:
        """Return zeroed, aligned memory of `size` bytes on the device.

        Raises:
            BackendError: the device does not have enough memory.
        """
        with self.current():
            return Block(self._context, size, self._zeroing)

    def staging(self, size: int) -> NDArray[np.uint8]:
        """Return `size` bytes of zeroed, page-locked host memory, which the device can read and write directly.

        For example, `staging(4096)` is uint8 [4096].
        """
        with self.current():
            array: NDArray[np.uint8] = np.asarray(_Pinned(self._context, max(size, 1)))
        array[...] = 0
        return array

    def queue(self) -> Queue:
        """Return a new queue of work on this device."""
        with self.current():
            return Queue(self._context)

    def event(self) -> Event:
        """Return a new event, not recorded yet."""
        with self.current():
            return Event(self._context, self._flags)


class _Pinned:
    """Page-locked memory with NumPy's array interface; it is freed when no array uses it."""

    def __init__(self, context: Context, size: int) -> None:
        address = _own(self, context, "cuMemHostAlloc", "cuMemFreeHost", size, 0)
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


def _own(
    owner: object,
    context: Context,
    create: str,
    destroy: str,
    *arguments: int | None,
    kind: type[ctypes.c_void_p | ctypes.c_uint64] = ctypes.c_void_p,
) -> int:
    """Create a handle or an address with CUDA; destroy it when `owner` is garbage-collected.

    At the end of the process nothing is destroyed here, because the system frees everything.
    """
    instance = kind()
    try:
        with context.driver.beside_records():
            getattr(context.driver, create)(ctypes.byref(instance), *arguments)
    finally:
        if instance.value:  # Ctrl-C may arrive after the driver has created the handle: it must be destroyed then, too
            weakref.finalize(owner, context.quietly, destroy, instance.value).atexit = False
    return instance.value or 0


def _places(kind: int, address: int) -> tuple[int | None, int]:
    """Return the (host, device) addresses of one side of `Memcpy2D`."""
    return (address, 0) if kind == HOST else (None, address)


@cache
def open_cuda() -> Device:
    """Return the first visible GPU, opened once per process.

    Raises:
        BackendError: there is no usable driver or device.
    """
    return Device(open_driver())
