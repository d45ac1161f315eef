"""A device and an engine in memory: they do what real ones do, late, and refuse what real ones get wrong silently.

Work is done when somebody waits for it, not when it is put in, so whoever reads a result or reuses what is to be copied
too early is found out. Every address must lie in memory that was allocated. An engine refuses outputs that overlap
inputs unless it declared that they share memory. Programs are the bundle's graphs, run by ONNX Runtime on the CPU at
those addresses.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from txl_engines.composing import compose, whole_programs
from txl_runtime.bundle.reading import Bundle
from txl_runtime.device.backend import DeviceBackend
from txl_runtime.device.dtypes import tensor_bytes
from txl_runtime.device.interface import ALIGNMENT, Executable, Launch
from txl_runtime.device.onnxruntime_cuda import OrtExecutable, OrtSessions
from txl_runtime.errors import BackendError

Work = Callable[[], None]


class StandInBlock:
    """Some bytes; an array behind an address."""

    def __init__(self, size: int) -> None:
        raw = np.zeros(size + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        self.array = raw[start : start + size]
        self.address, self.size = int(self.array.ctypes.data), size


class StandInEvent:
    def __init__(self, queue: StandInQueue, place: int) -> None:
        self._queue, self._place = queue, place

    def wait(self) -> None:
        self._queue.work_until(self._place)


class StandInQueue:
    """Work that is done when it is waited for.

    Attributes:
        log: names of everything done so far.
        captured, replayed: how often.
    """

    handle = 7

    def __init__(self, device: StandInDevice) -> None:
        self._device = device
        self._waiting: list[tuple[str, Work]] = []
        self._done = 0
        self._recording: list[tuple[str, Work]] | None = None
        self._lock = threading.RLock()
        self.log: list[str] = []
        self.bytes_copied = 0
        self.captured = self.replayed = 0

    def push(self, name: str, work: Work, *addresses: int) -> None:
        """Put work in; what it reads and writes of the device must not have been given back when its turn comes."""
        there = [weakref.ref(block) for address in addresses for block in self._device.around(address)]

        def checked() -> None:
            assert all(block() is not None for block in there), "work on memory that was given back"
            work()

        with self._lock:
            (self._waiting if self._recording is None else self._recording).append((name, checked))

    def copy(self, to: int, source: int, width: int, rows: int = 1, to_pitch: int = 0, source_pitch: int = 0) -> None:
        if rows > 1:
            assert min(to_pitch, source_pitch) >= width, "rows overlap"
        for start, pitch in ((to, to_pitch), (source, source_pitch)):
            self._device.check(start, (rows - 1) * pitch + width)
        to_end, source_end = (
            start + (rows - 1) * pitch + width for start, pitch in ((to, to_pitch), (source, source_pitch))
        )
        if rows == 1:
            assert to_end <= source or source_end <= to, "a copy onto itself"

        def work() -> None:
            for row in range(rows):
                ctypes.memmove(to + row * to_pitch, source + row * source_pitch, width)
            self.bytes_copied += rows * width

        self.push("copy", work, to, source)

    def zero(self, to: int, width: int, rows: int = 1, pitch: int = 0) -> None:
        assert self._device.holds(to), "only memory of the device is set"
        self._device.check(to, (rows - 1) * pitch + width)

        def work() -> None:
            for row in range(rows):
                ctypes.memset(to + row * pitch, 0, width)

        self.push("zero", work, to)

    def record(self) -> StandInEvent:
        with self._lock:
            return StandInEvent(self, self._done + len(self._waiting))

    def wait(self) -> None:
        self.record().wait()

    def capture(self, work: Launch) -> Launch:
        assert self._recording is None
        self._recording = recorded = []
        try:
            work()
        finally:
            self._recording = None
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            for name, piece in recorded:
                self.push(f"{name} (recorded)", piece)

        return replay

    def work_until(self, place: int) -> None:
        with self._lock:
            while self._done < place:
                name, work = self._waiting.pop(0)
                self._done += 1
                self.log.append(name)
                work()


class StandInDevice:
    title = "a stand-in"
    dlpack = (2, 0)

    def __init__(self) -> None:
        self.blocks: weakref.WeakSet[StandInBlock] = weakref.WeakSet()

    def allocate(self, size: int) -> StandInBlock:
        block = StandInBlock(size)
        self.blocks.add(block)
        return block

    def staging(self, size: int) -> NDArray[np.uint8]:
        return StandInBlock(size).array

    def queue(self) -> StandInQueue:
        return StandInQueue(self)

    def around(self, address: int) -> list[StandInBlock]:
        return [block for block in self.blocks if block.address <= address < block.address + block.size]

    def holds(self, address: int) -> bool:
        return bool(self.around(address))

    def check(self, address: int, size: int) -> None:
        """A range has to lie in one block of the device, or outside of all."""
        for block in self.blocks:
            if address < block.address + block.size and block.address < address + size:
                inside = block.address <= address and address + size <= block.address + block.size
                assert inside, "a range that leaves its block"

    @property
    def used(self) -> int:
        return sum(block.size for block in self.blocks)


class StandInExecutable:
    """A program that runs when its turn in the queue comes."""

    def __init__(self, inner: OrtExecutable, device: StandInDevice, recordable: bool = True) -> None:
        self._inner, self._device = inner, device
        self.program, self.in_place, self.recordable = inner.program, inner.in_place, recordable
        self.prepared = 0

    def prepare(self, addresses: Mapping[str, int], queue: Any) -> Launch:
        self.prepared += 1
        sizes = {spec.name: tensor_bytes(spec) for spec in (*self.program.inputs, *self.program.outputs)}
        assert addresses.keys() == sizes.keys()
        for name, address in addresses.items():
            assert self._device.holds(address), f"{name} is not on the device"
            self._device.check(address, sizes[name])
        for output in self.program.outputs:
            for given in self.program.inputs:
                apart = (
                    addresses[output.name] + sizes[output.name] <= addresses[given.name]
                    or addresses[given.name] + sizes[given.name] <= addresses[output.name]
                )
                assert apart or self.in_place.get(output.name) == given.name, f"{output.name} overlaps {given.name}"
        launch = self._inner.prepare(addresses, queue)
        return lambda: queue.push(f"run {self.program.name}", launch)


def open_stand_in(
    bundle: Bundle,
    update: str | None = None,
    name: str = "rtx",
    kinds: tuple[str, ...] = ("logprobs", "last", "score", "step"),
    recordable: bool = True,
    device: StandInDevice | None = None,
    change: Callable[[Executable], None] | None = None,
) -> DeviceBackend:
    """A bundle's whole programs, on a stand-in device; as `choosing.open_device` opens them on a real one."""
    device = device or StandInDevice()
    rule = update or bundle.manifest.updates[0]
    sessions = OrtSessions(onnxruntime, bundle, ["CPUExecutionProvider"], "cpu")
    executables = []
    for program in whole_programs(bundle.manifest, rule):
        if program.kind in kinds:
            inner = sessions.executable(program, compose(bundle, program))
            executables.append(StandInExecutable(inner, device, recordable))
            if change is not None:
                change(executables[-1])
    return DeviceBackend(name, "a stand-in engine", device, device.queue(), executables)


class DeviceArray:
    """Somebody else's array on the stand-in device, as DLPack hands it over."""

    def __init__(self, device: StandInDevice, values: NDArray[Any]) -> None:
        self.block = device.allocate(values.nbytes)
        self.array = self.block.array.view(values.dtype).reshape(values.shape)
        self.array[...] = values
        self._where = device.dlpack
        self.asked_for: list[int | None] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._where

    def __dlpack__(self, stream: int | None = None) -> Any:
        self.asked_for.append(stream)
        return self.array.__dlpack__()


def refuse(message: str) -> Callable[..., Any]:
    """Something that fails as an engine does."""

    def fail(*_: Any, **__: Any) -> Any:
        raise BackendError(message)

    return fail
