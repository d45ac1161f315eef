"""Engines of NVIDIA's libraries that run: `run_engines` teaches a stand-in for TensorRT (`stand_ins.tensorrt`) to.

Each engine is a bundle's program, run by ONNX Runtime on the stand-in for CUDA's driver. What the real bindings do when
something is wrong can be asked for: they raise, return nothing, or return False.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any

from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import Program
from txl_runtime.device.interface import Launch

from stand_ins.driver import FakeDriver
from stand_ins.engine import GraphRun, place_work

KINDS = {"int32": "INT32", "float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "bool": "BOOL"}
REFUSED = "cudaMalloc: operation not permitted when stream is capturing"
FAULTS = (
    "no runtime",  # the factory returned nullptr, and the bindings None
    "no runtime, TypeError",  # the factory returned nullptr, and pybind11 says so
    "no context",
    "no context, RuntimeError",
    "address refused",
    "address, TypeError",
    "cache refused",
    "cache, RuntimeError",
    "run refused",
    "run, RuntimeError",
    "not recordable",
)

Engine = tuple[GraphRun, Mapping[str, str]]
"""A graph, and of its outputs those that share an input's memory."""


def run_engines(
    trt: Any, bundle: Bundle, programs: dict[str, Program], driver: FakeDriver, faults: Collection[str] = ()
) -> SimpleNamespace:
    """Teach a stand-in for TensorRT to run the engines of a bundle.

    Args:
        trt: from `stand_ins.tensorrt.fake`.
        bundle: whose graphs the engines are made of.
        programs: by the SHA-256 of the engine's bytes.
        driver, faults: see `run_graphs`.
    """

    def find(data: bytes) -> Engine | None:
        program = programs.get(hashlib.sha256(data).hexdigest())
        if program is None:
            return None
        states = bundle.manifest.states_of("ring") if program.update == "ring" else ()
        return GraphRun(bundle, program), {state.output: state.input for state in states}

    return run_graphs(trt, find, driver, faults)


def run_graphs(
    trt: Any, find: Callable[[bytes], Engine | None], driver: FakeDriver, faults: Collection[str] = ()
) -> SimpleNamespace:
    """Teach a stand-in for TensorRT to run engines.

    Args:
        trt: from `stand_ins.tensorrt.fake`.
        find: what is in an engine's bytes; None where the library refuses them.
        driver: on whose streams they run.
        faults: what goes wrong, of `FAULTS`; a mutable collection may change later.

    Returns:
        What was seen: contexts made, caches that were given (and not refused), how often caches were serialised.
    """
    seen = SimpleNamespace(contexts=0, caches=[], serialized=0)

    def make(title: str, **values: Any) -> Any:
        made = getattr(trt, title)()
        for key, value in values.items():
            object.__setattr__(made, key, value)
        return made

    def wrong(what: str, returned: Any, error: type[Exception] = RuntimeError) -> Any:
        """What a call gives that goes wrong."""
        if f"{what}, {error.__name__}" in faults:
            raise error(f"pybind11 says that {what}")
        return returned

    def deserialize(runtime: Any, data: Any) -> Any:
        made_in = driver.here("an engine's memory")
        found = find(bytes(data))
        if found is None or not driver.makes_memory():
            runtime._logger.log(1, "Serialization assertion failed" if found is None else REFUSED)
            return None
        return engine(*found, made_in)

    def engine(graph: GraphRun, in_place: Mapping[str, str], made_in: int) -> Any:
        program = graph.program
        specs = {spec.name: spec for spec in (*program.outputs, *program.inputs)}
        inputs, names = {spec.name for spec in program.inputs}, sorted(specs)

        def context(*given: Any) -> Any:
            driver.here("an execution context", made_in)
            if "no context" in faults or not driver.makes_memory():
                return None
            wrong("no context", None)
            seen.contexts += 1
            addresses: dict[str, int] = {}
            tied: list[tuple[int, Launch]] = []

            def execute(handle: int) -> bool:
                driver.here("an engine's run", made_in)
                wrong("run", None)
                if "run refused" in faults:
                    return False
                if not tied:
                    if not driver.makes_memory():
                        return False
                    refused = "waiting for the stream" if "not recordable" in faults else ""
                    tied.append((handle, place_work(driver, graph, in_place, addresses, handle, refused)))
                stream, launch = tied[0]
                if stream != handle:
                    driver.violations.append(f"{program.name} was run on two streams, and recorded on one")
                launch()
                return True

            def set_address(name: str, address: int) -> bool:
                wrong("address", None, TypeError)
                if tied:
                    driver.violations.append(f"{program.name}: {name} was moved after the context had run")
                addresses[name] = address
                return name in specs and "address refused" not in faults

            return make("IExecutionContext", set_tensor_address=set_address, execute_async_v3=execute)

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
            return make(
                "IRuntimeConfig", create_runtime_cache=lambda: cache, set_runtime_cache=lambda given: given is cache
            )

        return make(
            "ICudaEngine",
            num_io_tensors=len(names),
            get_tensor_name=lambda i: names[i],
            get_tensor_mode=lambda name: trt.TensorIOMode.INPUT if name in inputs else trt.TensorIOMode.OUTPUT,
            get_tensor_dtype=lambda name: getattr(trt.DataType, KINDS[specs[name].dtype]),
            get_tensor_shape=lambda name: specs[name].fixed,
            create_execution_context=context,
            **({"create_runtime_config": runtime_config} if trt.__name__ == "tensorrt_rtx" else {}),
            **({"get_aliased_input_tensor": in_place.get} if _has_aliases(trt) else {}),
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


def _has_aliases(trt: Any) -> bool:
    """Whether this version has aliased tensors: its class refuses what is not listed."""
    try:
        trt.ICudaEngine().get_aliased_input_tensor  # noqa: B018
    except NotImplementedError:
        return True
    except AttributeError:
        return False
    return True
