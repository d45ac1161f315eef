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
from txl_runtime.device.interface import ALIGNMENT

from stand_ins.device_memory import GARBAGE, Block, Bytes, Memory, ViolationError
from stand_ins.device_work import Scheduler, Stream, Task
from stand_ins.driver_functions import Functions
from stand_ins.driver_statuses import ILLEGAL_ADDRESS, NOT_INITIALIZED, Refused, Status

WITHOUT_CONTEXT = ("cuInit", "cuDriver", "cuGetError", "cuDevice", "cuCtx", "cuThread")


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


class FakeDriver(Functions):
    """The library. Give it to `txl_runtime.device.driver.Driver`.

    Args:
        seed: of what is done when; None leaves all work until somebody waits for it.
        eager: do work as soon as it is asked for.
        unified: give addresses of the device that the host can read, for executables that run on the host.
        capacity: bytes of the device.
        devices: how many there are.
        integrated: whether they are of a board; events have to fit that.

    Attributes:
        violations: what a GPU would have done wrong.
        calls: names of the functions called, and how often.
        log: names of the tasks done, in their order.
        attributes: of its devices, by the driver's numbers, as it says.
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
        integrated: bool = False,
    ) -> None:
        self.violations: list[str] = []
        self.calls: Counter[str] = Counter()
        self.failures: list[tuple[str, Status]] = []
        super().__init__(Memory(unified), Scheduler(seed, eager, self._went_wrong), capacity, devices, integrated)
        self.log = self.scheduler.log
        self._lock, self._process, self._lost = threading.RLock(), os.getpid(), False
        self._told: list[Told] = []
        for name in dir(type(self)):
            if name.startswith("cu"):
                setattr(self, name, Function(self, name, getattr(self, name)))
        FakeDriver.made.append(self)

    # --- what tests ask of it -------------------------------------------------------------------------------------

    def tell(
        self,
        name: str | tuple[str, ...],
        outcome: Status | BaseException | type[BaseException],
        after: int = 0,
        times: int = 1,
        done: bool = False,
    ) -> Told:
        """Have calls of a function fail.

        Args:
            name: how its name begins, or one of several: "cuMem" is every function of memory, "engine" is `launch`.
            outcome: a status, or what is raised.
            after: calls that go well first.
            times: calls that fail then; all others go well.
            done: whether what was asked for is done all the same, as when a signal came during the call.

        Returns:
            What knows whether it came to that.
        """
        self._told.append(Told(name, outcome, after, times, done))
        return self._told[-1]

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
        made_in: int | None = None,
        uses: tuple[Block, tuple[int, int]] | None = None,
    ) -> None:
        """Put an engine's work into a stream.

        Args:
            work: takes copies of the ranges that are read, returns what is written into the others, as arrays.
            reads, writes: address and size.
            name: for the log.
            refused: why this cannot be recorded, where it cannot.
            made_in: the engine's context, from `here`.
            uses: a block that the engine's library made for this, and the range that it works in.
        """
        with self._lock:
            told = next((item for item in self._told if item.due("engine")), None)
            if told is not None:
                told.happen()
            try:
                self.check_context(self.need_context() if made_in is None else made_in, "the engine")
                into = self._find(stream, Stream)
                blocks = [self.block(address, size) for address, size in (*reads, *writes)]
                if any(address % ALIGNMENT for address, _ in (*reads, *writes)):
                    raise ViolationError(f"tensors that do not start at multiples of {ALIGNMENT}")
                scratch = None if uses is None else self.block(*uses[1])
                if scratch is not None and any(block is scratch for block in blocks):
                    raise ViolationError("tensors in the memory that is worked in")
            except (ViolationError, Refused) as error:
                self.violations.append(f"{name}: {error}")
                return

            def run() -> None:
                reading = [self.memory.view(*place).copy() for place in reads]
                if uses is not None:
                    self.memory.view(*uses[1])[...] = GARBAGE
                results = work(reading)
                for place, result in zip(writes, results, strict=True):
                    self.memory.view(*place)[...] = np.ascontiguousarray(result).reshape(-1).view(np.uint8)

            held = blocks if uses is None or scratch is None else [*blocks, uses[0], scratch]
            try:
                self.scheduler.push(into, Task(name, run, held, refused, scratch=scratch))
            except ViolationError as error:
                self.violations.append(f"{name}: {error}")

    def here(self, what: str, made_in: int | None = None) -> int:
        """The context in which a library makes or uses something; one that is missing or another is a violation."""
        try:
            found = self.need_context()
            self.check_context(found if made_in is None else made_in, what)
        except (ViolationError, Refused) as error:
            self.violations.append(f"{what}: {error!r}")
            return 0
        return found

    def makes_memory(self) -> bool:
        """Return whether a library may make memory of its own now; a refusal spoils the other's capture, too."""
        try:
            self._refuse_while_capturing()
        except Refused:
            return False
        return True

    def library_memory(self, size: int) -> Block | None:
        """Memory that a library makes of its own; None where there is none, or somebody's record forbids it."""
        with self._lock:
            if self.recording_here():
                self.violations.append("a library was asked to make memory by a thread that records")
            try:
                return self._allocate(size, "device") if self.makes_memory() else None
            except Refused:
                return None

    def library_frees(self, blocks: Sequence[Block]) -> None:
        """Free a library's memory at its end; nobody may need that any more."""
        with self._lock:
            for block in blocks:
                try:
                    self.memory.free(block.address, "device")
                except ViolationError as error:
                    self.violations.append(f"a library: {error}")

    def recording(self, stream: int) -> bool:
        """Return whether a library's work in a stream is recorded."""
        return self._find(stream, Stream).recording is not None

    def recording_here(self) -> bool:
        """Return whether this thread records."""
        mine = threading.get_ident()
        return any(stream.recording is not None and stream.thread == mine for stream in self.scheduler.streams)

    def spoil(self, stream: int, why: str) -> None:
        """A library does what a record does not bear."""
        self._find(stream, Stream).invalid = why

    def drain(self) -> None:
        """Do everything that was asked for."""
        with self._lock:
            for stream in self.scheduler.streams:
                self.scheduler.finish(stream)

    def held(self) -> list[str]:
        """Return in words what was not given back."""
        kinds = sorted(f"a {block.kind} block of {len(block.data)} bytes" for block in self.memory.held)
        return kinds + [f"a {type(thing).__name__.lower()}" for thing in self.handles.values()]

    def check(self, everything: bool = False) -> None:
        """Assert that nothing went wrong, no capture is open and no context left behind; at the end, nothing held."""
        if everything and self.held():
            gc.collect()
        assert not self.violations, "; ".join(self.violations)
        assert not any(stream.recording is not None for stream in self.scheduler.streams), "a capture is open"
        assert not self.left_current, "a context was left current"
        assert not self.relaxed, "this thread was left relaxed"
        if everything:
            assert not self.held(), f"not given back: {', '.join(self.held())}"

    # --- how a function is called ---------------------------------------------------------------------------------

    def call(self, name: str, work: Callable[..., None], arguments: list[Any]) -> Status:
        """Run one function, with everything that every function does."""
        if os.getpid() != self._process:
            return NOT_INITIALIZED
        waits = name.endswith("Synchronize")
        if waits and threading.active_count() > 1 and self.scheduler.chance(0.2):
            time.sleep(0)  # other threads go first
        with self._lock:
            self.calls[name] += 1
            told = next((item for item in self._told if item.due(name)), None)
            try:
                if not self.begun and not name.startswith(("cuInit", "cuDriver", "cuGetError")):
                    raise Refused(NOT_INITIALIZED)
                if told is not None and not told.done:
                    told.happen()
                if not name.startswith(WITHOUT_CONTEXT):
                    self.need_context()
                self.scheduler.some()
                work(*arguments)
                if waits and self._lost:
                    raise Refused(ILLEGAL_ADDRESS)
                if told is not None and told.done:
                    told.happen()
            except Refused as error:
                self.failures.append((name, error.status))
                return error.status
            except ViolationError as error:
                self.violations.append(f"{name}: {error}")
                self.failures.append((name, ILLEGAL_ADDRESS))
                return ILLEGAL_ADDRESS
        return 0

    def _went_wrong(self, error: BaseException) -> None:
        self.violations.append(f"during work: {error!r}")
        self._lost = True


class Told:
    """The faults that `FakeDriver.tell` was asked for.

    Attributes:
        reached: whether a call has failed because of it.
    """

    def __init__(
        self,
        name: str | tuple[str, ...],
        outcome: Status | BaseException | type[BaseException],
        after: int,
        times: int,
        done: bool,
    ) -> None:
        self._name, self._outcome, self._after, self._times, self.done = name, outcome, after, times, done
        self.reached = False

    def due(self, name: str) -> bool:
        """Return whether this call of a function is to fail."""
        if not name.startswith(self._name) or not self._times:
            return False
        if self._after:
            self._after -= 1
            return False
        self._times -= 1
        self.reached = True
        return True

    def happen(self) -> None:
        """Fail."""
        if isinstance(self._outcome, int):
            raise Refused(self._outcome)
        raise self._outcome
