"""The functions of CUDA's driver, as `stand_ins.driver` calls them: arguments are numbers, and references of ctypes."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from typing import Any

from stand_ins.device_memory import Block, Memory, ViolationError, host_bytes, rows_of
from stand_ins.device_work import Graph, Scheduler, Stream, Task
from stand_ins.driver_statuses import (
    ACTIVE,
    CAPTURE_INVALIDATED,
    CAPTURE_UNSUPPORTED,
    CAPTURED_EVENT,
    DEVICE,
    HOST,
    ILLEGAL_STATE,
    INTEGRATED,
    INVALID_CONTEXT,
    INVALID_DEVICE,
    INVALID_VALUE,
    INVALIDATED,
    MAJOR,
    MAX_PITCH,
    MEMORY_BITS,
    MEMORY_KHZ,
    MINOR,
    MULTIPROCESSORS,
    NAMES,
    NO_DEVICE,
    NO_TIMING,
    NON_BLOCKING,
    OUT_OF_MEMORY,
    RELAXED,
    SLEEPS,
    WRONG_THREAD,
    MemoryCopy,
    Refused,
)


class Functions:
    """All functions, and what they work on.

    Args:
        memory, scheduler: of the devices.
        capacity: bytes of each kind of memory.
        devices: how many there are.
        integrated: whether they are of a board.
    """

    def __init__(
        self, memory: Memory, scheduler: Scheduler, capacity: int, devices: int, integrated: bool = False
    ) -> None:
        self.integrated = integrated
        self.memory, self.scheduler, self.capacity, self.devices = memory, scheduler, capacity, devices
        self.bytes_copied = self.captured = self.replayed = 0
        self.handles: dict[int, Any] = {}
        self._made_in: dict[int, int] = {}
        # An RTX 3060's, but for the multiprocessors.
        self.attributes = {
            MAJOR: 8,
            MINOR: 6,
            MULTIPROCESSORS: 16,
            INTEGRATED: int(integrated),
            MEMORY_KHZ: 7_501_000,
            MEMORY_BITS: 192,
        }
        self.contexts: list[int] = [0x1000 + device for device in range(devices)]
        self.retained: Counter[int] = Counter()
        self.begun, self._next = False, 0x5000
        self._modes = threading.local()  # how strict each thread is with captures
        self._stacks, self._all_stacks = threading.local(), list[list[int]]()

    @property
    def left_current(self) -> bool:
        """True if some thread still has a context."""
        return any(self._all_stacks)

    def unwind(self) -> None:
        """Take all contexts from their threads: `support.interrupted` interrupts where no signal does, too."""
        for stack in self._all_stacks:
            stack.clear()

    def need_context(self) -> int:
        """The context of this thread; what needs one is refused where there is none."""
        if not self._stack or not self._stack[-1]:
            raise Refused(INVALID_CONTEXT)
        return self._stack[-1]

    def set_device(self, ordinal: int) -> None:
        """As the runtime's cudaSetDevice: the device's own context takes the place of what this thread has."""
        self._stack[-1:] = [self.contexts[ordinal]]

    def check_context(self, made_in: int, what: str) -> None:
        """Refuse the use of a thing outside its context: the driver notices some of it, and not what it breaks."""
        if made_in != (here := self.need_context()):
            raise ViolationError(f"{what} was made in context {made_in:#x} and used in {here:#x}")

    def block(self, address: int, size: int) -> Block:
        """The block of the device that holds a range, see `Memory.block`."""
        found = self.memory.block(address, size, "device")
        self.check_context(found.context, "a block")
        return found

    @property
    def _stack(self) -> list[int]:
        if not hasattr(self._stacks, "contexts"):
            self._stacks.contexts = []
            self._all_stacks.append(self._stacks.contexts)
        stack: list[int] = self._stacks.contexts
        return stack

    def _new(self, thing: Any) -> int:
        self._next += 0x10
        self.handles[self._next], self._made_in[self._next] = thing, self.need_context()
        return self._next

    def _find(self, handle: int, kind: type) -> Any:
        thing = self.handles.get(handle)
        if not isinstance(thing, kind):
            raise ViolationError(f"{handle:#x} is no {kind.__name__.lower()} that lives")
        self.check_context(self._made_in[handle], f"a {kind.__name__.lower()}")
        return thing

    def _refuse_while_capturing(self) -> None:
        """Refuse unsafe calls while a capture is open, unless it is relaxed, or this thread is."""
        mine, strictness = threading.get_ident(), getattr(self._modes, "mode", 0)
        for stream in self.scheduler.streams:
            own = stream.thread == mine and stream.mode != RELAXED
            if stream.recording is not None and strictness != RELAXED and (own or stream.mode == strictness == 0):
                stream.invalid = "an unsafe call"
                raise Refused(CAPTURE_UNSUPPORTED)

    # --- the driver, devices, contexts ----------------------------------------------------------------------------

    def cuInit(self, flags: int) -> None:
        if not self.devices:
            raise Refused(NO_DEVICE)
        self.begun = True

    def cuDriverGetVersion(self, version: Any) -> None:
        version._obj.value = 12060

    def cuGetErrorName(self, code: int, said: Any) -> None:
        if code not in NAMES:
            raise Refused(INVALID_VALUE)
        said._obj.value = NAMES[code][0].encode()

    def cuGetErrorString(self, code: int, said: Any) -> None:
        if code not in NAMES:
            raise Refused(INVALID_VALUE)
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
        if attribute not in self.attributes:
            raise ViolationError(f"attribute {attribute}, of which the stand-in knows nothing")
        value._obj.value = self.attributes[attribute]

    def _device(self, ordinal: int) -> None:
        if not 0 <= ordinal < self.devices:
            raise Refused(INVALID_DEVICE)

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> None:
        self._device(device)
        self.retained[device] += 1
        context._obj.value = self.contexts[device]

    def cuDevicePrimaryCtxRelease_v2(self, device: int) -> None:
        if not self.retained[device]:
            raise Refused(INVALID_CONTEXT)
        self.retained[device] -= 1

    def cuCtxGetCurrent(self, context: Any) -> None:
        context._obj.value = self._stack[-1] if self._stack else None

    def cuCtxPushCurrent_v2(self, context: int) -> None:
        if context not in self.contexts:
            raise Refused(INVALID_CONTEXT)
        self._stack.append(context)

    def cuCtxPopCurrent_v2(self, context: Any) -> None:
        if not self._stack:
            raise Refused(INVALID_CONTEXT)
        popped = self._stack.pop()
        if context:
            context._obj.value = popped

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:
        before, self._modes.mode = getattr(self._modes, "mode", 0), mode._obj.value
        mode._obj.value = before

    @property
    def relaxed(self) -> bool:
        """True if this thread was left so."""
        return getattr(self._modes, "mode", 0) == RELAXED

    # --- memory ---------------------------------------------------------------------------------------------------

    def cuMemAlloc_v2(self, address: Any, size: int) -> None:
        self._refuse_while_capturing()
        address._obj.value = self._allocate(size, "device").address

    def cuMemHostAlloc(self, address: Any, size: int, flags: int) -> None:
        self._refuse_while_capturing()
        address._obj.value = self._allocate(size, "pinned").address

    def _allocate(self, size: int, kind: str) -> Block:
        if size <= 0:
            raise Refused(INVALID_VALUE)
        if self.memory.used(kind) + size > self.capacity:
            raise Refused(OUT_OF_MEMORY)
        made = self.memory.allocate(size, kind)
        made.context = self.need_context()
        return made

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
                blocks.append(self.block(address, size) if kind == DEVICE else self.memory.block(address, size, where))
                views.append(rows_of(self.memory.view(address, size, where), width, rows, pitch))
            else:
                pageable = True
                views.append(rows_of(host_bytes(address, size), width, rows, pitch))
        if to[0] == source[0] and _overlap(to, source, width, rows):
            raise ViolationError("a copy onto itself")
        if pageable and stream.recording is not None:
            stream.invalid = "a copy of pageable memory"
            raise Refused(CAPTURE_UNSUPPORTED)
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
        block, view = self.block(to, size), self.memory.view(to, size)

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
            raise Refused(CAPTURE_UNSUPPORTED)
        self._refuse_while_capturing()
        self.scheduler.finish(found)

    def cuStreamBeginCapture_v2(self, stream: int, mode: int) -> None:
        found = self._find(stream, Stream)
        if found.recording is not None:
            raise Refused(ILLEGAL_STATE)
        found.recording, found.invalid, found.mode, found.thread = [], "", mode, threading.get_ident()

    def cuStreamEndCapture(self, stream: int, graph: Any) -> None:
        found = self._find(stream, Stream)
        if found.recording is None:
            raise Refused(ILLEGAL_STATE)
        if found.mode != RELAXED and found.thread != threading.get_ident():
            raise Refused(WRONG_THREAD)
        tasks, found.recording = found.recording, None
        graph._obj.value = None
        if found.invalid:
            raise Refused(CAPTURE_INVALIDATED)
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
        if not flags & NO_TIMING:
            raise ViolationError("an event that takes the time")
        if bool(flags & SLEEPS) != self.integrated:
            raise ViolationError("an event that keeps a core busy on a board" if self.integrated else "a late event")
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
            raise Refused(CAPTURED_EVENT)
        self._refuse_while_capturing()
        if found.stream is not None:
            self.scheduler.finish(found.stream, found.place)


def _overlap(to: tuple[int, int, int], source: tuple[int, int, int], width: int, rows: int) -> bool:
    """Return whether rows of one range share bytes with rows of another."""
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
