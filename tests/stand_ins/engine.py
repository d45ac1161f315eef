"""An engine on the stand-in for CUDA: the composed graphs of a bundle, run by ONNX Runtime on copies of what they read.

The device, its queue and its memory are the real ones of `txl_runtime.device`, over `stand_ins.driver.FakeDriver`. An
engine here refuses outputs that overlap inputs unless it declared that they share memory, and memory that is not its
device's.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import onnxruntime
from numpy.typing import NDArray
from txl_engines.building import NEWEST_OPSET
from txl_engines.checking import read_graph
from txl_engines.composing import compose, whole_programs
from txl_engines.given_weights import give_weights
from txl_engines.rounded_weights import round_weights
from txl_runtime.bundle.engines.sidecar import GivenWeight, Rounding
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import Program, TensorSpec, tensor_bytes
from txl_runtime.device.backend import DeviceBackend
from txl_runtime.device.cuda import Device
from txl_runtime.device.driver import Driver
from txl_runtime.device.dtypes import stored_type
from txl_runtime.device.interface import Executable, Launch
from txl_runtime.errors import BackendError

from stand_ins.device_memory import Block
from stand_ins.driver import FakeDriver
from stand_ins.driver_statuses import GLOBAL

WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
ONNX_TYPES = {"bfloat16": 16, "float8e4m3fn": 17}
Work = Callable[[list[NDArray[np.uint8]]], Sequence[NDArray[Any]]]


class GraphRun:
    """A program's graph in ONNX Runtime, over arrays of bytes; weights among its inputs are read as all are."""

    _opened: dict[tuple[str, ...], Any] = {}  # noqa: RUF012 - graphs are opened once for all tests

    def __init__(self, bundle: Bundle, program: Program, rounding: Rounding | None = None) -> None:
        manifest, self.program = bundle.manifest, program
        own = tuple(spec for spec in program.inputs if not isinstance(spec, GivenWeight))
        plain = msgspec.structs.replace(program, inputs=own, file="composed.onnx")
        given = program.inputs[len(own) :]
        key = (str(bundle.path), manifest.model_id, manifest.precision, program.name, str(len(given)), rounding or "")
        if key not in self._opened:
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 3
            options.intra_op_num_threads = 1
            options.add_session_config_entry(WEIGHTS_FOLDER, str(bundle.path))
            graph = compose(bundle, plain)
            if rounding:  # else ONNX Runtime rounds activations, too
                options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
            if given or rounding:
                changed, shared = read_graph(graph, plain, bundle.path, NEWEST_OPSET), manifest.weights if given else ""
                changed = round_weights(changed, plain, rounding, shared) if rounding else changed
                changed = give_weights(changed, shared) if shared else changed
                assert changed.given == given, "what was built is given other weights"
                graph = changed.data
            self._opened[key] = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self._session = self._opened[key]

    def bind(self) -> Work:
        """Work with memory of its own: from copies of all inputs to all outputs, in the program's order."""
        program, binding = self.program, self._session.io_binding()
        given, returned = ([_buffer(spec) for spec in side] for side in (program.inputs, program.outputs))
        for spec, buffer in zip(program.inputs, given, strict=True):
            binding.bind_input(spec.name, "cpu", 0, _element(spec), spec.fixed, buffer.ctypes.data)
        for spec, buffer in zip(program.outputs, returned, strict=True):
            binding.bind_output(spec.name, "cpu", 0, _element(spec), spec.fixed, buffer.ctypes.data)

        def work(reads: list[NDArray[np.uint8]]) -> Sequence[NDArray[Any]]:
            for buffer, read in zip(given, reads, strict=True):
                buffer[: len(read)] = read
            self._session.run_with_iobinding(binding)
            return [buffer[: tensor_bytes(spec)] for spec, buffer in zip(program.outputs, returned, strict=True)]

        return work


def _buffer(spec: TensorSpec) -> NDArray[np.uint8]:
    return np.zeros(max(tensor_bytes(spec), 1), np.uint8)


def _element(spec: TensorSpec) -> Any:
    return ONNX_TYPES.get(spec.dtype, stored_type(spec.dtype).type)


class StandInExecutable(Executable):
    """A program that runs when its turn comes.

    Attributes:
        prepared: how often it was tied to memory.
    """

    def __init__(self, driver: FakeDriver, bundle: Bundle, program: Program, recordable: bool = True) -> None:
        self._driver, self._graph, self.program, self.recordable = (
            driver,
            GraphRun(bundle, program),
            program,
            recordable,
        )
        states = bundle.manifest.states_of(program.update)
        self.in_place: Mapping[str, str] = {s.output: s.input for s in states if s.slots is not None}
        self.prepared = 0

    def prepare(self, addresses: Mapping[str, int], queue: Any) -> Launch:
        self.prepared += 1
        self._driver.here(self.program.name)
        return place_work(self._driver, self._graph, self.in_place, addresses, queue.handle)


def place_work(
    driver: FakeDriver,
    graph: GraphRun,
    in_place: Mapping[str, str],
    addresses: Mapping[str, int],
    stream: int,
    refused: str = "",
    uses: tuple[Block, tuple[int, int]] | None = None,
) -> Launch:
    """Tie a graph to memory, as an engine's context is; see `FakeDriver.launch` for `refused` and `uses`."""
    program = graph.program
    reads, writes = (
        [(addresses[spec.name], tensor_bytes(spec)) for spec in side] for side in (program.inputs, program.outputs)
    )
    assert addresses.keys() == {spec.name for spec in (*program.inputs, *program.outputs)}
    for output, (start, size) in zip(program.outputs, writes, strict=True):
        for given, (begin, length) in zip(program.inputs, reads, strict=True):
            apart = start + size <= begin or begin + length <= start
            assert apart or in_place.get(output.name) == given.name, f"{output.name} overlaps {given.name}"
    work, made_in = graph.bind(), driver.here(program.name)

    def launch() -> None:
        driver.launch(stream, work, reads, writes, f"run {program.name}", refused, made_in, uses)

    return launch


def open_stand_in(
    bundle: Bundle,
    update: str | None = None,
    name: str = "rtx",
    kinds: tuple[str, ...] | None = None,
    recordable: bool = True,
    driver: FakeDriver | None = None,
    change: Callable[[Executable], None] | None = None,
) -> StandInBackend:
    """A bundle's whole programs, on a stand-in device; as `choosing.open_device` opens them on a real one.

    Args:
        kinds: of the programs; None for all.
        recordable: whether the loop may record them.
        driver: the library of the device; its own, if None.
        change: is shown every executable.
    """
    driver = driver or FakeDriver()
    rule = update or bundle.manifest.updates[0]
    executables = []
    for program in whole_programs(bundle.manifest, rule):
        if kinds is None or program.kind in kinds:
            executables.append(StandInExecutable(driver, bundle, program, recordable))
            if change is not None:
                change(executables[-1])
    device = open_fake_device(driver)
    return StandInBackend(driver, name, "a stand-in engine", device, device.queue(), executables)


def open_fake_device(driver: FakeDriver) -> Device:
    """The device of a stand-in for the library."""
    return Device(Driver(driver))


@contextlib.contextmanager
def recording_elsewhere(driver: FakeDriver, backend: DeviceBackend) -> Iterator[None]:
    """Another thread records a backend's queue meanwhile, in the strictest mode, and nothing may spoil that."""

    def call(name: str, argument: Any) -> int:
        with backend.device.current():
            return int(getattr(driver, name)(backend.queue.handle, argument))

    graph = ctypes.c_void_p()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(call, "cuStreamBeginCapture_v2", GLOBAL).result() == 0
        try:
            yield
        finally:
            ended = other.submit(call, "cuStreamEndCapture", ctypes.byref(graph)).result()
    assert ended == 0, "what was recorded is spoilt"
    with backend.device.current():
        driver.cuGraphDestroy(graph.value)


class StandInBackend(DeviceBackend):
    """A backend that knows its stand-in.

    Attributes:
        driver: the library of its device.
    """

    def __init__(self, driver: FakeDriver, *arguments: Any) -> None:
        self.driver = driver
        super().__init__(*arguments)


def refuse(message: str) -> Callable[..., Any]:
    """Something that fails as an engine does."""

    def fail(*_: Any, **__: Any) -> Any:
        raise BackendError(message)

    return fail
