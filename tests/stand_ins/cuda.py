"""Engines of NVIDIA's libraries that run: `run_engines` teaches a stand-in for TensorRT (`stand_ins.tensorrt`) to.

Each engine is a bundle's program, run by ONNX Runtime on the stand-in for CUDA's driver. What the real bindings do when
something is wrong can be asked for: they raise, return nothing, or return False.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from txl_engines import given_weights
from txl_engines.building import NEWEST_OPSET
from txl_engines.checking import read_graph
from txl_engines.composing import compose, whole_programs
from txl_runtime.bundle.engines.files import find_engines
from txl_runtime.bundle.engines.sidecar import GivenWeight, Rounding, with_weights
from txl_runtime.bundle.reading import Bundle, open_bundle
from txl_runtime.bundle.tables import Program
from txl_runtime.device.backend import DeviceBackend
from txl_runtime.device.engines.library import Library
from txl_runtime.device.engines.opening import give_weights, give_workspace, load_engines
from txl_runtime.device.engines.running import EngineRuntime

from stand_ins.contexts import REFUSED, Loaded
from stand_ins.driver import FakeDriver
from stand_ins.engine import GraphRun, StandInBackend, open_fake_device
from stand_ins.tensorrt import fake

KINDS = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "float8e4m3fn": "FP8"}
KINDS |= {"int32": "INT32", "int8": "INT8", "bool": "BOOL"}
FAULTS = (
    "no runtime",  # the factory returned nullptr, and the bindings None
    "no runtime, TypeError",  # the factory returned nullptr, and pybind11 says so
    "no context",
    "no context, RuntimeError",
    "address refused",
    "address, TypeError",
    "memory refused",
    "not capturable",
    "cache refused",
    "cache, RuntimeError",
    "run refused",
    "run, RuntimeError",
    "not recordable",
)

Engine = tuple[GraphRun, Mapping[str, str]]
"""A graph, and of its outputs those that share an input's memory."""


def run_engines(
    trt: Any,
    bundle: Bundle,
    programs: dict[str, Program],
    driver: FakeDriver,
    faults: Collection[str] = (),
    given_memory: bool = True,
    rounding: Rounding | None = None,
) -> SimpleNamespace:
    """Teach a stand-in for TensorRT to run the engines of a bundle.

    Args:
        trt: from `stand_ins.tensorrt.fake`.
        bundle: whose graphs the engines are made of.
        programs: by the SHA-256 of the engine's bytes.
        driver, faults, given_memory: see `run_graphs`.
        rounding: the precision to which the engines round matrices.
    """

    def find(data: bytes) -> Engine | None:
        program = programs.get(hashlib.sha256(data).hexdigest())
        if program is None:
            return None
        states = bundle.manifest.states_of("ring") if program.update == "ring" else ()
        return GraphRun(bundle, program, rounding), {state.output: state.input for state in states}

    return run_graphs(trt, find, driver, faults, given_memory)


def run_graphs(
    trt: Any,
    find: Callable[[bytes], Engine | None],
    driver: FakeDriver,
    faults: Collection[str] = (),
    given_memory: bool = True,
) -> SimpleNamespace:
    """Teach a stand-in for TensorRT to run engines.

    Args:
        trt: from `stand_ins.tensorrt.fake`.
        find: what is in an engine's bytes; None where the library refuses them.
        driver: on whose streams they run.
        faults: what goes wrong, of `FAULTS`; a mutable collection may change later.
        given_memory: whether TensorRT-RTX built them with REQUIRE_USER_ALLOCATION.

    Returns:
        What was seen: contexts made and their strategies for CUDA graphs, caches that were given (and not refused), how
        often caches were serialised.
    """
    seen = SimpleNamespace(contexts=0, graphs=[], caches=[], serialized=0)

    def make(title: str, **values: Any) -> Any:
        made = getattr(trt, title)()
        for key, value in values.items():
            if _listed(trt, title, key):
                object.__setattr__(made, key, value)
        return made

    def wrong(what: str, returned: Any, error: type[Exception] = RuntimeError) -> Any:
        """Return or raise the result of a call that goes wrong."""
        if f"{what}, {error.__name__}" in faults:
            raise error(f"pybind11 says that {what}")
        return returned

    def deserialize(runtime: Any, data: Any) -> Any:
        made_in = driver.here("an engine's memory")
        found = find(bytes(data))
        tell = partial(runtime._logger.log, 1)
        if found is None or not driver.makes_memory():
            tell("Serialization assertion failed" if found is None else REFUSED)
            return None
        return engine(*found, made_in, tell)

    def engine(graph: GraphRun, in_place: Mapping[str, str], made_in: int, tell: Callable[[str], None]) -> Any:
        program = graph.program
        specs = {spec.name: spec for spec in (*program.outputs, *program.inputs)}
        inputs, names = {spec.name for spec in program.inputs}, sorted(specs)
        flagged = given_memory and trt.__name__ == "tensorrt_rtx"
        loaded = Loaded(trt, driver, made_in, graph, in_place, flagged, tell, faults, seen)

        def context(*given: Any) -> Any:
            found = loaded.context(*(read_config(config) for config in given))
            methods = ("set_tensor_address", "set_device_memory", "is_stream_capturable", "execute_async_v3")
            return found and make("IExecutionContext", **{name: getattr(found, name) for name in methods})

        def runtime_config() -> Any:
            def serialize() -> bytes:
                driver.here("kernels", made_in)
                seen.serialized += 1
                return b"kernels of " + program.name.encode() + b"!" * seen.contexts

            def accept(blob: bytes) -> bool:
                driver.here("kernels", made_in)
                wrong("cache", None)
                if "cache refused" in faults:
                    return False
                seen.caches.append(blob)
                return True

            cache = make("IRuntimeCache", serialize=serialize, deserialize=accept)
            config = make(
                "IRuntimeConfig", create_runtime_cache=lambda: cache, set_runtime_cache=lambda given: given is cache
            )
            allocate = partial(object.__setattr__, config, "_allocation")
            object.__setattr__(config, "set_execution_context_allocation_strategy", allocate)
            return config

        return make(
            "ICudaEngine",
            num_io_tensors=len(names),
            get_tensor_name=lambda i: names[i],
            get_tensor_mode=lambda name: trt.TensorIOMode.INPUT if name in inputs else trt.TensorIOMode.OUTPUT,
            get_tensor_dtype=lambda name: getattr(trt.DataType, KINDS[specs[name].dtype]),
            get_tensor_shape=lambda name: specs[name].fixed,
            create_execution_context=context,
            create_runtime_config=runtime_config,
            device_memory_size_v2=loaded.working_bytes,
            get_aliased_input_tensor=in_place.get,
        )

    start = trt.Runtime.__init__

    def started(runtime: Any, logger: Any) -> None:
        driver.here("a runtime")
        start(runtime, logger)

    trt.Runtime.__init__ = started
    trt.Runtime.deserialize_cuda_engine = deserialize
    if "no runtime" in faults:
        trt.Runtime = lambda logger: None
    elif "no runtime, TypeError" in faults:
        trt.Runtime = lambda logger: wrong("no runtime", None, TypeError)
    return seen


def open_built(
    path: Path,
    version: str = "rtx171",
    faults: Collection[str] = (),
    driver: FakeDriver | None = None,
    given_memory: bool = True,
    update: str | None = None,
) -> tuple[DeviceBackend, FakeDriver, SimpleNamespace]:
    """The engines that a bundle has, opened by a library's version; CUDA's driver, and what was seen besides."""
    bundle, driver, trt = open_bundle(path), driver or FakeDriver(), fake(version, SimpleNamespace(data=b""))
    library = Library("rtx" if trt.__name__ == "tensorrt_rtx" else "tensorrt", trt)
    found = find_engines(bundle, library.target)
    programs = {engine.sidecar.sha256: with_weights(engine.program, engine.sidecar.identity.given) for engine in found}
    rounding = found[0].sidecar.identity.rounding or None
    seen = run_engines(trt, bundle, programs, driver, faults, given_memory, rounding)
    return load_engines(bundle, library, open_fake_device(driver), update), driver, seen


def open_library(
    bundle: Bundle,
    update: str,
    version: str,
    driver: FakeDriver,
    faults: Collection[str] = (),
    given_memory: bool = True,
    shared: bool = False,
) -> StandInBackend:
    """A bundle's whole programs as engines of a library's version, on a stand-in device.

    The bytes of an engine are the name of its program. For `given_memory` see `run_graphs`; engines that are `shared`
    read in one place what `given_weights` takes for a large weight.
    """
    trt = fake(version, SimpleNamespace(data=b""))
    library = Library("rtx" if trt.__name__ == "tensorrt_rtx" else "tensorrt", trt)
    programs = {program.name.encode(): program for program in whole_programs(bundle.manifest, update)}
    given = {data: given_to(bundle, program) if shared else () for data, program in programs.items()}
    hashes = {
        hashlib.sha256(data).hexdigest(): with_weights(program, given[data]) for data, program in programs.items()
    }
    run_engines(trt, bundle, hashes, driver, faults, given_memory)
    device = open_fake_device(driver)
    with device.current():
        runtime = EngineRuntime(library)
        lent, queue = given_memory and library.target == "rtx", device.queue()
        executables = [runtime.load(p.name, data, p, None, lent, given[data]) for data, p in programs.items()]
        give_weights(executables, bundle, device, queue)
        give_workspace(executables, device)
    return StandInBackend(driver, "rtx", library.title, device, queue, executables)


def given_to(bundle: Bundle, program: Program) -> tuple[GivenWeight, ...]:
    """The weights that an engine of a program takes as inputs."""
    whole = msgspec.structs.replace(program, file="composed.onnx")
    graph = read_graph(compose(bundle, whole), whole, bundle.path, NEWEST_OPSET)
    return given_weights.give_weights(graph, bundle.manifest.weights).given


def read_config(config: Any) -> SimpleNamespace:
    """Return the settings of a runtime configuration for a context that is made with it."""
    allocation = config.__dict__.get("_allocation")
    graphs = config.__dict__.get("cuda_graph_strategy")
    return SimpleNamespace(
        allocation="STATIC" if allocation is None else allocation.name,
        records_itself=graphs is not None and graphs.name == "WHOLE_GRAPH_CAPTURE",
    )


def _listed(trt: Any, title: str, name: str) -> bool:
    """Return whether a class of this version has a member: it refuses those that are not listed."""
    try:
        getattr(getattr(trt, title)(), name)
    except NotImplementedError:
        return True
    except AttributeError:
        return False
    return True
