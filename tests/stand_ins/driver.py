"""libcuda, as far as the runtime calls it, without a GPU: stricter than one.

`FakeDriver` has the functions of NVIDIA's driver API under their names and signatures, as a library that ctypes has
loaded. What a GPU does late is done late, what it refuses is refused with its status, and what it would do wrong in
silence is a violation: the function fails, and `violations` keeps what happened, whoever swallows the status.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from txl_runtime.device.driver import SIGNATURES

from stand_ins.device_memory import Block, Bytes, Memory, ViolationError, host_bytes, rows_of
from stand_ins.device_work import Graph, Scheduler, Stream, Task

INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE, INVALID_DEVICE = 1, 2, 3, 100, 101
INVALID_CONTEXT, INVALID_HANDLE, ILLEGAL_STATE, ILLEGAL_ADDRESS = 201, 400, 401, 700
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, WRONG_THREAD, CAPTURED_EVENT, UNKNOWN = 900, 901, 908, 907, 999
NAMES = {
    INVALID_VALUE: ("CUDA_ERROR_INVALID_VALUE", "invalid argument"),
    OUT_OF_MEMORY: ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
    NOT_INITIALIZED: ("CUDA_ERROR_NOT_INITIALIZED", "initialization error"),
    NO_DEVICE: ("CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"),
    INVALID_DEVICE: ("CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"),
    INVALID_CONTEXT: ("CUDA_ERROR_INVALID_CONTEXT", "invalid device context"),
    INVALID_HANDLE: ("CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"),
    ILLEGAL_STATE: ("CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"),
    ILLEGAL_ADDRESS: ("CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"),
    CAPTURE_UNSUPPORTED: (
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        "operation not permitted when stream is capturing",
    ),
    CAPTURE_INVALIDATED: (
        "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        "operation failed due to a previous error during capture",
    ),
    CAPTURED_EVENT: ("CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capture"),
    WRONG_THREAD: ("CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "capture was not ended in the thread that began it"),
    UNKNOWN: ("CUDA_ERROR_UNKNOWN", "unknown error"),
}
HOST, DEVICE = 1, 2
NON_BLOCKING, NO_TIMING = 1, 2
RELAXED, ACTIVE, INVALIDATED = 2, 1, 2
MAX_PITCH = 2**31 - 1
MAJOR, MINOR = 75, 76
WITHOUT_CONTEXT = ("cuInit", "cuDriver", "cuGetError", "cuDevice", "cuCtx")
Status = int


class MemoryCopy(ctypes.Structure):
    """CUDA_MEMCPY2D as cuda.h has it; whatever the caller calls its fields, they have to lie here."""

    _fields_ = (
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_type", ctypes.c_int),
        ("source_host", ctypes.c_void_p),
        ("source_device", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("to_x", ctypes.c_size_t),
        ("to_y", ctypes.c_size_t),
        ("to_type", ctypes.c_int),
        ("to_host", ctypes.c_void_p),
        ("to_device", ctypes.c_uint64),
        ("to_array", ctypes.c_void_p),
        ("to_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Refused(Exception):
    """A function fails as the driver's does."""

    def __init__(self, status: Status) -> None:
        super().__init__(NAMES[status][0])
        self.status = status


class Function:
    """One function of the library: takes what ctypes would pass on under its signature, returns a status."""

    def __init__(self, driver: FakeDriver, name: str, work: Callable[..., None]) -> None:
        self._driver, self.__name__, self._work, self._types = driver, name, work, SIGNATURES[name]

    def __call__(self, *arguments: Any) -> Status:
        values = [self._passed(value, kind) for value, kind in zip(arguments, self._types, strict=True)]
        return self._driver.call(self.__name__, self._work, values)

    def _passed(self, value: Any, kind: Any) -> Any:
        """A number or a reference, as the C function would see it."""
        if issubclass(kind, ctypes._Pointer):
            if not isinstance(getattr(value, "_obj", None), kind._type_) and not isinstance(value, ctypes.Array):
                raise TypeError(f"{self.__name__} takes a reference to {kind._type_.__name__}, not {value!r}")
            return value
        if isinstance(value, ctypes._SimpleCData):
            value = value.value
        if value is None and kind is ctypes.c_void_p:
            return 0
        if (kind(value).value or 0) != value:
            self._driver.violations.append(f"{self.__name__}: {value:#x} does not fit a {kind.__name__}")
        return int(value)


class FakeDriver:
    """The library. Give it to `txl_runtime.device.driver.Driver`.

    Args:
        seed: of what is done when; None leaves all work until somebody waits for it.
        eager: do work as soon as it is asked for.
        unified: give addresses of the device that the host can read, for executables that run on the host.
        capacity: bytes of the device.
        devices: how many there are.

    Attributes:
        violations: what a GPU would have done wrong.
        calls: names of the functions called, and how often.
        log: names of the tasks done, in their order.
        bytes_copied: to, from and within the device, by what was done.
        captured, replayed: graphs made, and launched.
        failures: functions that failed and their statuses.
    """

    made: list[FakeDriver] = []  # noqa: RUF012 - for the fixture that asks each test's drivers for violations

    def __init__(
        self,
        seed: int | None = None,
        eager: bool = False,
        unified: bool = False,
        capacity: int = 2**30,
        devices: int = 1,
    ) -> None:
        self.violations: list[str] = []
        self.calls: Counter[str] = Counter()
        self.failures: list[tuple[str, Status]] = []
        self.bytes_copied = self.captured = self.replayed = 0
        self.capacity, self.devices = capacity, devices
        self.memory = Memory(unified)
        self.scheduler = Scheduler(seed, eager, self._went_wrong)
        self.log = self.scheduler.log
        self.handles: dict[int, Any] = {}
        self.contexts: list[int] = [0x1000 + device for device in range(devices)]
        self.retained: Counter[int] = Counter()
        self._lock, self._stacks = threading.RLock(), threading.local()
        self._all_stacks: list[list[int]] = []
        self._process, self._next, self._begun, self._lost = os.getpid(), 0x5000, False, False
        self._told: list[_Told] = []
        for name in dir(type(self)):
            if name.startswith("cu"):
                setattr(self, name, Function(self, name, getattr(self, name)))
        FakeDriver.made.append(self)

    # --- what tests ask of it -------------------------------------------------------------------------------------

    def tell(
        self,
        name: str,
        outcome: Status | BaseException | type[BaseException],
        after: int = 0,
        times: int = 1,
        done: bool = False,
    ) -> None:
        """Have calls of a function fail.

        Args:
            name: how its name begins: "cuMem" is every function of memory.
            outcome: a status, or what is raised.
            after: so many calls go well first.
            times: so many fail, then all go well again.
            done: whether what was asked for is done all the same, as when a signal came during the call.
        """
        self._told.append(_Told(name, outcome, after, times, done))

    def forgive(self) -> None:
        """Take back what `tell` said."""
        self._told.clear()

    def launch(
        self,
        stream: int,
        work: Callable[[list[Bytes]], Sequence[Any]],
        reads: Sequence[tuple[int, int]] = (),
        writes: Sequence[tuple[int, int]] = (),
        name: str = "run",
        refused: str = "",
    ) -> None:
        """Put an engine's work into a stream.

        Args:
            work: takes copies of the ranges that are read, returns what is written into the others, as arrays.
            reads, writes: address and size.
            name: for the log.
            refused: why this cannot be recorded, where it cannot.
        """
        with self._lock:
            try:
                self._need_context()
                blocks = [self.memory.block(address, size, "device") for address, size in (*reads, *writes)]
            except (ViolationError, _Refused) as error:
                self.violations.append(f"{name}: {error}")
                return

            def run() -> None:
                results = work([self.memory.view(*place).copy() for place in reads])
                for place, result in zip(writes, results, strict=True):
                    self.memory.view(*place)[...] = np.ascontiguousarray(result).reshape(-1).view(np.uint8)

            self.scheduler.push(self.handles[stream], Task(name, run, blocks, refused))

    def drain(self) -> None:
        """Do everything that was asked for."""
        with self._lock:
            for stream in self.scheduler.streams:
                self.scheduler.finish(stream)

    def held(self) -> list[str]:
        """What was not given back, in words."""
        kinds = [f"a {block.kind} block of {len(block.data)} bytes" for block in self.memory.held]
        return kinds + [f"a {type(thing).__name__.lower()}" for thing in self.handles.values()]

    def check(self, everything: bool = False) -> None:
        """Assert that nothing went wrong, no capture is open and no context left behind; at the end, nothing held."""
        if everything:
            gc.collect()
        assert not self.violations, "; ".join(self.violations)
        assert not any(stream.recording is not None for stream in self.scheduler.streams), "a capture is open"
        assert not any(self._all_stacks), "a context was left current"
        if everything:
            assert not self.held(), f"not given back: {', '.join(self.held())}"

    # --- how a function is called ---------------------------------------------------------------------------------

    def call(self, name: str, work: Callable[..., None], arguments: list[Any]) -> Status:
        """Run one function, with everything that every function does."""
        if os.getpid() != self._process:
            return NOT_INITIALIZED
        waits = name.endswith("Synchronize")
        if waits and self.scheduler.chance(0.2):
            time.sleep(0)  # other threads go first
        with self._lock:
            self.calls[name] += 1
            told = next((item for item in self._told if item.due(name)), None)
            try:
                if not self._begun and not name.startswith(("cuInit", "cuDriver", "cuGetError")):
                    raise _Refused(NOT_INITIALIZED)
                if told is not None and not told.done:
                    told.happen()
                if not name.startswith(WITHOUT_CONTEXT):
                    self._need_context()
                self.scheduler.some()
                work(*arguments)
                if waits and self._lost:
                    raise _Refused(ILLEGAL_ADDRESS)
                if told is not None and told.done:
                    told.happen()
            except _Refused as error:
                self.failures.append((name, error.status))
                return error.status
            except ViolationError as error:
                self.violations.append(f"{name}: {error}")
                self.failures.append((name, ILLEGAL_ADDRESS))
                return ILLEGAL_ADDRESS
        return 0

    def _need_context(self) -> None:
        if not self._stack or not self._stack[-1]:
            raise _Refused(INVALID_CONTEXT)

    @property
    def _stack(self) -> list[int]:
        if not hasattr(self._stacks, "contexts"):
            self._stacks.contexts = []
            self._all_stacks.append(self._stacks.contexts)
        stack: list[int] = self._stacks.contexts
        return stack

    def _went_wrong(self, error: BaseException) -> None:
        self.violations.append(f"during work: {error!r}")
        self._lost = True

    def _new(self, thing: Any) -> int:
        self._next += 0x10
        self.handles[self._next] = thing
        return self._next

    def _find(self, handle: int, kind: type) -> Any:
        thing = self.handles.get(handle)
        if not isinstance(thing, kind):
            raise ViolationError(f"{handle:#x} is no {kind.__name__.lower()} that lives")
        return thing

    def _refuse_while_capturing(self) -> None:
        """What is unsafe is refused while a capture is open, unless that is relaxed."""
        mine = threading.get_ident()
        for stream in self.scheduler.streams:
            if stream.recording is not None and (stream.mode == 0 or (stream.mode == 1 and stream.thread == mine)):
                stream.invalid = "an unsafe call"
                raise _Refused(CAPTURE_UNSUPPORTED)

    # --- the driver, devices, contexts ----------------------------------------------------------------------------

    def cuInit(self, flags: int) -> None:
        if not self.devices:
            raise _Refused(NO_DEVICE)
        self._begun = True

    def cuDriverGetVersion(self, version: Any) -> None:
        version._obj.value = 12060

    def cuGetErrorName(self, code: int, said: Any) -> None:
        if code not in NAMES:
            raise _Refused(INVALID_VALUE)
        said._obj.value = NAMES[code][0].encode()

    def cuGetErrorString(self, code: int, said: Any) -> None:
        if code not in NAMES:
            raise _Refused(INVALID_VALUE)
        said._obj.value = NAMES[code][1].encode()

    def cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = self.devices

    def cuDeviceGet(self, device: Any, ordinal: int) -> None:
        self._device(ordinal)
        device._obj.value = ordinal

    def cuDeviceGetName(self, name: Any, length: int, device: int) -> None:
        self._device(device)
        name.value = b"Fake RTX"[: length - 1]

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> None:
        self._device(device)
        value._obj.value = {MAJOR: 8, MINOR: 6}.get(attribute, 0)

    def _device(self, ordinal: int) -> None:
        if not 0 <= ordinal < self.devices:
            raise _Refused(INVALID_DEVICE)

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> None:
        self._device(device)
        self.retained[device] += 1
        context._obj.value = self.contexts[device]

    def cuDevicePrimaryCtxRelease_v2(self, device: int) -> None:
        if not self.retained[device]:
            raise _Refused(INVALID_CONTEXT)
        self.retained[device] -= 1

    def cuCtxGetCurrent(self, context: Any) -> None:
        context._obj.value = self._stack[-1] if self._stack else None

    def cuCtxPushCurrent_v2(self, context: int) -> None:
        if context not in self.contexts:
            raise _Refused(INVALID_CONTEXT)
        self._stack.append(context)

    def cuCtxPopCurrent_v2(self, context: Any) -> None:
        if not self._stack:
            raise _Refused(INVALID_CONTEXT)
        popped = self._stack.pop()
        if context:
            context._obj.value = popped

    # --- memory ---------------------------------------------------------------------------------------------------

    def cuMemAlloc_v2(self, address: Any, size: int) -> None:
        self._refuse_while_capturing()
        address._obj.value = self._allocate(size, "device").address

    def cuMemHostAlloc(self, address: Any, size: int, flags: int) -> None:
        self._refuse_while_capturing()
        address._obj.value = self._allocate(size, "pinned").address

    def _allocate(self, size: int, kind: str) -> Block:
        if size <= 0:
            raise _Refused(INVALID_VALUE)
        if self.memory.used(kind) + size > self.capacity:
            raise _Refused(OUT_OF_MEMORY)
        return self.memory.allocate(size, kind)

    def cuMemFree_v2(self, address: int) -> None:
        self._refuse_while_capturing()
        self.memory.free(address, "device")

    def cuMemFreeHost(self, address: int) -> None:
        self._refuse_while_capturing()
        self.memory.free(address, "pinned")

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> None:
        free._obj.value, total._obj.value = self.capacity - self.memory.used(), self.capacity

    # --- copies ---------------------------------------------------------------------------------------------------

    def cuMemcpyHtoDAsync_v2(self, to: int, source: int, size: int, stream: int) -> None:
        self._copy(stream, (DEVICE, to, 0), (HOST, source, 0), size, 1)

    def cuMemcpyDtoHAsync_v2(self, to: int, source: int, size: int, stream: int) -> None:
        self._copy(stream, (HOST, to, 0), (DEVICE, source, 0), size, 1)

    def cuMemcpyDtoDAsync_v2(self, to: int, source: int, size: int, stream: int) -> None:
        self._copy(stream, (DEVICE, to, 0), (DEVICE, source, 0), size, 1)

    def cuMemcpy2DAsync_v2(self, given: Any, stream: int) -> None:
        found = given._obj
        if ctypes.sizeof(found) != ctypes.sizeof(MemoryCopy):
            raise ViolationError(f"CUDA_MEMCPY2D has {ctypes.sizeof(found)} bytes, not {ctypes.sizeof(MemoryCopy)}")
        asked = MemoryCopy.from_buffer_copy(found)
        sides = []
        for side in ("to", "source"):
            kind, pitch, x, y = (getattr(asked, f"{side}_{name}") for name in ("type", "pitch", "x", "y"))
            if kind not in (HOST, DEVICE):
                raise ViolationError(f"a copy's memory is of type {kind}, not host or device")
            if not asked.width + x <= pitch <= MAX_PITCH:
                raise ViolationError(f"rows of {asked.width} bytes do not fit a pitch of {pitch}")
            start = getattr(asked, f"{side}_{'host' if kind == HOST else 'device'}") or 0
            sides.append((kind, start + y * pitch + x, pitch))
        self._copy(stream, sides[0], sides[1], asked.width, asked.height)

    def _copy(self, handle: int, to: tuple[int, int, int], source: tuple[int, int, int], width: int, rows: int) -> None:
        stream, blocks = self._find(handle, Stream), []
        if width == 0 or rows == 0:
            return
        pageable = False
        views = []
        for kind, address, pitch in (to, source):
            size = (rows - 1) * pitch + width
            if kind == DEVICE or self.memory.pinned(address, size):
                where = "device" if kind == DEVICE else "pinned"
                blocks.append(self.memory.block(address, size, where))
                views.append(rows_of(self.memory.view(address, size, where), width, rows, pitch))
            else:
                pageable = True
                views.append(rows_of(host_bytes(address, size), width, rows, pitch))
        if to[0] == source[0] and _overlap(to, source, width, rows):
            raise ViolationError("a copy onto itself")
        if pageable and stream.recording is not None:
            stream.invalid = "a copy of pageable memory"
            raise _Refused(CAPTURE_UNSUPPORTED)
        if pageable and source[0] == HOST:
            views[1] = views[1].copy()  # it is read now, and may change or go

        def work() -> None:
            views[0][...] = views[1]
            self.bytes_copied += width * rows

        self.scheduler.push(stream, Task("copy", work, blocks))
        if pageable and to[0] == HOST:
            self.scheduler.finish(stream)

    def cuMemsetD8Async(self, to: int, value: int, size: int, stream: int) -> None:
        self._set(stream, to, size, value, size, 1)

    def cuMemsetD2D8Async(self, to: int, pitch: int, value: int, width: int, height: int, stream: int) -> None:
        if height == 1:
            raise ViolationError("one row was set by the function for several, which may refuse long ones")
        self._set(stream, to, pitch, value, width, height)

    def _set(self, handle: int, to: int, pitch: int, value: int, width: int, rows: int) -> None:
        stream = self._find(handle, Stream)
        if not 0 < width <= pitch or rows <= 0:
            raise ViolationError(f"{rows} rows of {width} bytes with a pitch of {pitch}")
        size = (rows - 1) * pitch + width
        block, view = self.memory.block(to, size, "device"), self.memory.view(to, size)

        def work() -> None:
            rows_of(view, width, rows, pitch)[...] = value

        self.scheduler.push(stream, Task("zero", work, [block]))

    # --- streams, captures, graphs, events ------------------------------------------------------------------------

    def cuStreamCreate(self, stream: Any, flags: int) -> None:
        if flags != NON_BLOCKING:
            raise ViolationError("a stream that waits for the default one")
        made = Stream()
        self.scheduler.streams.append(made)
        stream._obj.value = self._new(made)

    def cuStreamDestroy_v2(self, stream: int) -> None:
        gone = self._find(stream, Stream)
        if gone.recording is not None:
            raise ViolationError("a stream was destroyed that was recording")
        self.scheduler.finish(gone)  # it goes when its work is done
        self.scheduler.streams.remove(gone)
        del self.handles[stream]

    def cuStreamSynchronize(self, stream: int) -> None:
        found = self._find(stream, Stream)
        if found.recording is not None:
            found.invalid = "waiting for the stream"
            raise _Refused(CAPTURE_UNSUPPORTED)
        self._refuse_while_capturing()
        self.scheduler.finish(found)

    def cuStreamBeginCapture_v2(self, stream: int, mode: int) -> None:
        found = self._find(stream, Stream)
        if found.recording is not None:
            raise _Refused(ILLEGAL_STATE)
        found.recording, found.invalid, found.mode, found.thread = [], "", mode, threading.get_ident()

    def cuStreamEndCapture(self, stream: int, graph: Any) -> None:
        found = self._find(stream, Stream)
        if found.recording is None:
            raise _Refused(ILLEGAL_STATE)
        if found.mode != RELAXED and found.thread != threading.get_ident():
            raise _Refused(WRONG_THREAD)
        tasks, found.recording = found.recording, None
        graph._obj.value = None
        if found.invalid:
            raise _Refused(CAPTURE_INVALIDATED)
        graph._obj.value = self._new(Graph(tasks))

    def cuStreamIsCapturing(self, stream: int, status: Any) -> None:
        found = self._find(stream, Stream)
        status._obj.value = 0 if found.recording is None else INVALIDATED if found.invalid else ACTIVE

    def cuGraphInstantiateWithFlags(self, made: Any, graph: int, flags: int) -> None:
        found = self._find(graph, Graph)
        self.captured += 1
        made._obj.value = self._new(GraphExec(list(found.tasks)))

    def cuGraphDestroy(self, graph: int) -> None:
        self._find(graph, Graph)
        del self.handles[graph]

    def cuGraphExecDestroy(self, graph: int) -> None:
        found = self._find(graph, GraphExec)
        del self.handles[graph]
        if found.pending:
            raise ViolationError("recorded work was destroyed before it was done")

    def cuGraphLaunch(self, graph: int, stream: int) -> None:
        found, into = self._find(graph, GraphExec), self._find(stream, Stream)
        if into.recording is not None:
            raise ViolationError("recorded work was recorded")
        self.replayed += 1
        self.scheduler.launch(into, found)

    def cuEventCreate(self, event: Any, flags: int) -> None:
        if flags != NO_TIMING:
            raise ViolationError("an event that takes the time")
        event._obj.value = self._new(Event())

    def cuEventDestroy_v2(self, event: int) -> None:
        self._find(event, Event)
        del self.handles[event]

    def cuEventRecord(self, event: int, stream: int) -> None:
        found, into = self._find(event, Event), self._find(stream, Stream)
        found.captured = into.recording is not None
        found.stream, found.place = into, into.asked

    def cuEventSynchronize(self, event: int) -> None:
        found = self._find(event, Event)
        if found.captured:
            assert found.stream is not None
            found.stream.invalid = "waiting for an event"
            raise _Refused(CAPTURED_EVENT)
        self._refuse_while_capturing()
        if found.stream is not None:
            self.scheduler.finish(found.stream, found.place)


def _overlap(to: tuple[int, int, int], source: tuple[int, int, int], width: int, rows: int) -> bool:
    """Whether rows of one range share bytes with rows of another."""
    (_, start, pitch), (_, other, other_pitch) = to, source
    if start >= other + (rows - 1) * other_pitch + width or other >= start + (rows - 1) * pitch + width:
        return False
    if rows == 1 or pitch != other_pitch:
        return True
    return not width <= (start - other) % pitch <= pitch - width


class GraphExec(Graph):
    """A graph that can be launched."""


class Event:
    """A place in a stream's work."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.place, self.captured = 0, False


class _Told:
    """What `FakeDriver.tell` was told."""

    def __init__(
        self, name: str, outcome: Status | BaseException | type[BaseException], after: int, times: int, done: bool
    ) -> None:
        self._name, self._outcome, self._after, self._times, self.done = name, outcome, after, times, done

    def due(self, name: str) -> bool:
        if not name.startswith(self._name) or not self._times:
            return False
        if self._after:
            self._after -= 1
            return False
        self._times -= 1
        return True

    def happen(self) -> None:
        if isinstance(self._outcome, int):
            raise _Refused(self._outcome)
        raise self._outcome
