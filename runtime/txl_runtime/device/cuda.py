"""A device and its memory, queues of work, places in them, and recorded work: what the loops do with CUDA's driver.

Addresses are plain integers. Work of one queue is done in the order in which it was asked for, while the host goes on;
only `Event.wait`, `Queue.wait` and the making of memory wait for it. Whoever calls a queue or an event has entered the
device, by `Device.current`; the device's own methods enter it themselves.

Host memory that is given to `send` and `fetch` has to be left alone until the copy is done: page-locked memory
(`Device.staging`) is read and written when the copy's turn comes, all other memory may be read before `send` returns.
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
"""Puts something into a queue."""
MEMORY_KHZ, MEMORY_BITS = 36, 37
"""CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE and _GLOBAL_MEMORY_BUS_WIDTH."""
WIDEST = 2**31 - 1
"""CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU so far: rows that lie further apart are copied and zeroed one by one."""


class Block:
    """Zeroed memory on the device, given back when nobody holds it any more.

    Attributes:
        address: where it starts, a multiple of 256.
        size: its bytes.
    """

    def __init__(self, context: Context, size: int, queue: Queue) -> None:
        self.size = max(size, 1)
        self.address = _own(self, context, "cuMemAlloc_v2", "cuMemFree_v2", self.size, kind=ctypes.c_uint64)
        # Waiting for this queue alone: to wait for the device would break what another thread is recording.
        try:
            with context.driver.beside_records():
                queue.zero(self.address, self.size)
                queue.wait()
        except BaseException:
            queue.settle()  # an interrupt: the memory goes back now, and may not be written any more
            raise


class Event:
    """A place in a queue's work; `Queue.record` sets it, as often as wanted.

    Attributes:
        handle: CUDA's.
    """

    def __init__(self, context: Context, flags: int) -> None:
        self.handle = _own(self, context, "cuEventCreate", "cuEventDestroy_v2", flags)
        self._synchronize = context.driver.cuEventSynchronize

    def wait(self) -> None:
        """Return when the work before the place where it was last recorded is done; at once where it never was."""
        self._synchronize(self.handle)


class Queue:
    """Work on the device, in order; CUDA calls it a stream, a word that is taken here.

    Rows of `send`, `fetch`, `copy` and `zero` are `width` bytes each, and a pitch is the bytes from one to the next.

    Attributes:
        handle: as engines want it.
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
        """Copy rows within the device; the two sides may not overlap."""
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
        given = (0, 0, from_kind, *_places(from_kind, source), None, from_pitch)
        taken = (0, 0, to_kind, *_places(to_kind, to), None, to_pitch)
        self._copy_rows(ctypes.byref(Memcpy2D(*given, *taken, width, rows)), self.handle)

    def zero(self, to: int, width: int, rows: int = 1, pitch: int = 0) -> None:
        """Set rows of bytes on the device to 0."""
        if width <= 0 or rows <= 0:
            return
        if rows == 1 or pitch == width:  # in one piece, and then of any size
            self._driver.cuMemsetD8Async(to, 0, width * rows, self.handle)
        elif pitch > WIDEST:
            for row in range(rows):
                self.zero(to + row * pitch, width)
        else:
            self._driver.cuMemsetD2D8Async(to, pitch, 0, width, rows, self.handle)

    def record(self, event: Event) -> None:
        """Make an event mean the place after everything that was asked for so far."""
        self._record(event.handle, self.handle)

    def wait(self) -> None:
        """Return when everything is done."""
        self._synchronize(self.handle)

    def settle(self) -> None:
        """Wait for everything where something failed already: of a further failure nobody is told."""
        self._context.quietly("cuStreamSynchronize", self.handle)

    def beside_records(self) -> AbstractContextManager[None]:
        """For `with`, where an engine makes memory of its own: other libraries may be recording. See `Driver`."""
        return self._driver.beside_records()

    def recording(self) -> bool:
        """Whether what is asked for now is recorded and not done; false where CUDA does not say."""
        state = ctypes.c_int()
        self._driver.quietly("cuStreamIsCapturing", self.handle, ctypes.byref(state))
        return bool(state.value)

    def capture(self, work: Work) -> Work:
        """Record what `work` would put into the queue, without doing it; the result does all of it at once.

        Whatever `work` raises comes out as it is, and the queue records no longer.

        Raises:
            BackendError: some of it cannot be recorded.
        """
        driver, graph = self._driver, ctypes.c_void_p()
        try:
            # Relaxed: memory that is given back meanwhile, in this thread or another, must not spoil the record.
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
        """End a record that failed on the way, if it has not ended; what it holds so far goes into `graph`."""
        if self.recording():
            self._driver.quietly("cuStreamEndCapture", self.handle, ctypes.byref(graph))


class _Replay:
    """A recorded piece of work. Holds what the record uses: the queue, and the engine's own memory."""

    def __init__(self, context: Context, graph: int | None, queue: Queue, work: Work) -> None:
        self._graph = _own(self, context, "cuGraphInstantiateWithFlags", "cuGraphExecDestroy", graph, 0)
        self._launch, self._stream, self._held = context.driver.cuGraphLaunch, queue.handle, (queue, work)

    def __call__(self) -> None:
        self._launch(self._graph, self._stream)


class Device:
    """A GPU, and the primary context of CUDA there, which it shares with every library of the process.

    Attributes:
        title: for people.
        ordinal: which of those that are visible.
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
        # Who waits for an event keeps a core busy and hears sooner, or on a board, whose cores are few, sleeps.
        self._flags = EVENTS[device_number(driver, ordinal, INTEGRATED) != 0]
        self._context = Context(driver, ordinal)
        with self.current():
            self._zeroing = Queue(self._context)

    def current(self) -> Current:
        """For `with`: work of this thread goes to this device meanwhile, and then again to where it went before.

        Raises:
            BackendError: on entry, in a process that was forked from the one that opened the device.
        """
        return Current(self._context)

    def bandwidth(self) -> float | None:
        """GB/s of its memory by the driver's figures; None without them, and on a Jetson, where they are wrong."""
        driver, ordinal = self._context.driver, self.ordinal
        try:
            numbers = [device_number(driver, ordinal, number) for number in (INTEGRATED, MEMORY_KHZ, MEMORY_BITS)]
        except BackendError:
            return None
        shared, khz, bits = numbers
        return None if shared else 2 * khz * bits / 8e6 or None  # two bits a clock on each line

    def allocate(self, size: int) -> Block:
        """Memory on the device, zeroed and aligned.

        Raises:
            BackendError: there is not enough.
        """
        with self.current():
            return Block(self._context, size, self._zeroing)

    def staging(self, size: int) -> NDArray[np.uint8]:
        """Memory on the host that the device can copy from and to without help (page-locked), zeroed."""
        with self.current():
            array: NDArray[np.uint8] = np.asarray(_Pinned(self._context, max(size, 1)))
        array[...] = 0
        return array

    def queue(self) -> Queue:
        """A new queue."""
        with self.current():
            return Queue(self._context)

    def event(self) -> Event:
        """A new event, which was not recorded yet."""
        with self.current():
            return Event(self._context, self._flags)


class _Pinned:
    """Page-locked memory, as NumPy's array interface describes it; given back when no array needs it any more."""

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
    """A handle or an address that CUDA creates, and destroys when the owner goes.

    The process's end gives back what is left then, and asks nobody to wait for it.
    """
    made = kind()
    try:
        with context.driver.beside_records():
            getattr(context.driver, create)(ctypes.byref(made), *arguments)
    finally:
        if made.value:  # an interrupt comes after the call, too
            weakref.finalize(owner, context.quietly, destroy, made.value).atexit = False
    return made.value or 0


def _places(kind: int, address: int) -> tuple[int | None, int]:
    """The host's and the device's address of one side of `Memcpy2D`."""
    return (address, 0) if kind == HOST else (None, address)


@cache
def open_cuda() -> Device:
    """The first GPU that is visible, opened once per process.

    Raises:
        BackendError: there is no usable driver or device.
    """
    return Device(open_driver())
