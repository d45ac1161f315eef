"""Execution contexts of NVIDIA's two libraries: whose memory they use, how they are set up, what a record bears.

The rules are those of the libraries' headers, docstrings and release notes. Where these leave something open, what is
not promised is refused:

* A context has device memory of its own from its making to its end, and works in more. That is its own, too, or, with
  TensorRT-RTX and USER_MANAGED, what it was given: aligned to 256 bytes, and as large as the engine says. An engine
  that was built with REQUIRE_USER_ALLOCATION has to be given it. Who refuses memory returns nothing, and logs an error.
* Memory to work in holds nothing between two runs, and serves one run at a time.
* Addresses and memory are set before the first run, and not while a stream records.
* A record bears a run only of a context that has run before, and whose run is done. TensorRT-RTX has to have said
  before the record that the stream is capturable, and must not record by itself as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from txl_runtime.device.interface import ALIGNMENT, Launch

from stand_ins.device_memory import Block, ViolationError
from stand_ins.driver import FakeDriver
from stand_ins.driver_statuses import Refused
from stand_ins.engine import GraphRun, place_work

REFUSED = "cudaMalloc: operation not permitted when stream is capturing"
OWN_BYTES = 64


@dataclass(frozen=True)
class Loaded:
    """An engine that was loaded.

    Attributes:
        trt: its library, from `stand_ins.tensorrt.fake`.
        driver, made_in: on whose streams it runs, and the context of CUDA that it was loaded in.
        graph, in_place: what it computes, and of its outputs those that share an input's memory.
        given_memory: whether it was built with REQUIRE_USER_ALLOCATION.
        tell: logs an error.
        faults: see `stand_ins.cuda.FAULTS`.
        seen: counts contexts, and keeps the strategy for CUDA graphs of each.
    """

    trt: Any
    driver: FakeDriver
    made_in: int
    graph: GraphRun
    in_place: Mapping[str, str]
    given_memory: bool
    tell: Callable[[str], None]
    faults: Collection[str]
    seen: SimpleNamespace

    @property
    def working_bytes(self) -> int:
        """The bytes that a run works in; they differ from program to program."""
        return 1000 + 8 * len(self.graph.program.name)

    def wrong(self, what: str, returned: Any = None, error: type[Exception] = RuntimeError) -> Any:
        """Return or raise the result of a call that goes wrong."""
        if f"{what}, {error.__name__}" in self.faults:
            raise error(f"pybind11 says that {what}")
        return returned

    def context(self, config: Any = None) -> Context | None:
        """Make an execution context; return None, with an error in the log, if the engine makes none."""
        self.driver.here("an execution context", self.made_in)
        self.wrong("no context")
        user_managed = config is not None and config.allocation == "USER_MANAGED"
        own = self.driver.library_memory(OWN_BYTES) if "no context" not in self.faults else None
        if own is None:
            return None
        blocks = [own]
        if self.given_memory and not user_managed:
            self.tell("the engine requires user allocation when creating an execution context")
            self.driver.library_frees(blocks)
            return None
        if not user_managed:
            working = self.driver.library_memory(self.working_bytes)
            if working is None:
                self.driver.library_frees(blocks)
                return None
            blocks.append(working)
        self.seen.contexts += 1
        if config is not None:
            self.seen.graphs.append("WHOLE_GRAPH_CAPTURE" if config.records_itself else "DISABLED")
        return Context(self, blocks, user_managed, config is not None and config.records_itself)


class Context:
    """Stands behind an execution context. The methods are those of the bindings."""

    def __init__(self, engine: Loaded, blocks: list[Block], user_managed: bool, records_itself: bool) -> None:
        self._engine, self._driver = engine, engine.driver
        self._own, self._user_managed, self._records_itself = blocks[0], user_managed, records_itself
        self._working: tuple[int, int] | None = None
        if not user_managed:
            self._working = blocks[1].address, engine.working_bytes
        self._addresses: dict[str, int] = {}
        self._tied: tuple[int, Launch] | None = None
        self._capturable = False
        weakref.finalize(self, self._driver.library_frees, blocks).atexit = False

    def set_tensor_address(self, name: str, address: int) -> bool:
        engine = self._engine
        engine.wrong("address", error=TypeError)
        self._set(name)
        self._addresses[name] = address
        program = engine.graph.program
        known = any(spec.name == name for spec in (*program.inputs, *program.outputs))
        return known and "address refused" not in engine.faults

    def set_device_memory(self, memory: int, size: int) -> None:
        engine = self._engine
        self._set("memory to work in")
        try:
            self._driver.block(memory, size)
            living = True
        except (ViolationError, Refused):
            living = False
        aligned, enough = memory % ALIGNMENT == 0, size >= engine.working_bytes
        if "memory refused" in engine.faults or not (self._user_managed and living and aligned and enough):
            engine.tell(f"API Usage Error (setDeviceMemoryV2: {size} bytes at {memory:#x})")
        else:
            self._working = memory, engine.working_bytes

    def is_stream_capturable(self, stream: int) -> bool:
        if self._driver.recording_here():
            self._driver.violations.append(f"{self._name} was asked about a stream while one records")
        if len(self._addresses) < len(self._names) or self._working is None:
            self._driver.violations.append(f"{self._name} was asked about a stream before it was set up")
        self._capturable = bool(stream) and self._engine.given_memory and "not capturable" not in self._engine.faults
        return self._capturable

    def execute_async_v3(self, stream_handle: int) -> bool:
        engine, driver = self._engine, self._driver
        driver.here("an engine's run", engine.made_in)
        engine.wrong("run")
        if "run refused" in engine.faults:
            return False
        if self._working is None or len(self._addresses) < len(self._names):
            engine.tell("API Usage Error (enqueueV3: an address or the device memory was not set)")
            return False
        if driver.recording(stream_handle) and (unfit := self._unfit()):
            engine.tell(unfit)
            driver.spoil(stream_handle, unfit)
            return False
        if self._tied is None:
            if not driver.makes_memory():
                engine.tell(REFUSED)
                return False
            refused = "waiting for the stream" if "not recordable" in engine.faults else ""
            uses = (self._own, self._working)
            tied = place_work(driver, engine.graph, engine.in_place, self._addresses, stream_handle, refused, uses)
            self._tied = stream_handle, tied
        stream, launch = self._tied
        if stream != stream_handle:
            driver.violations.append(f"{self._name} was run on two streams, and recorded on one")
        launch()
        return True

    @property
    def _name(self) -> str:
        return self._engine.graph.program.name

    @property
    def _names(self) -> list[str]:
        program = self._engine.graph.program
        return [spec.name for spec in (*program.inputs, *program.outputs)]

    def _set(self, what: str) -> None:
        if self._tied is not None:
            self._driver.violations.append(f"{self._name}: {what} was moved after the context had run")
        if self._driver.recording_here():
            self._driver.violations.append(f"{self._name}: {what} was set while a stream records")

    def _unfit(self) -> str:
        """Return why a record does not bear a run now."""
        if self._tied is None:
            return REFUSED
        if self._own.pending:
            return "the first run of the context is not done"
        if self._engine.trt.__name__ != "tensorrt_rtx":
            return ""
        if self._records_itself:
            return "cudaStreamBeginCapture: operation not permitted when stream is capturing"
        return "" if self._capturable else "the stream was not said to be capturable"
