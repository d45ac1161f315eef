"""Running engines of TensorRT and TensorRT-RTX: the only module of the runtime's loop that touches their objects.

As in `library`, what a version has is read from its facts, and objects are held under one name per class, which a test
uses to check every member that is named here against every version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from txl_runtime.bundle.tables import Program
from txl_runtime.device.engines.library import DTYPES, Library
from txl_runtime.device.interface import Launch, Queue
from txl_runtime.errors import BackendError, BundleError

__all__ = ["EngineExecutable", "EngineRuntime"]

REASONS = {
    "VERSION_MISMATCH": "it was built by another version of the library",
    "UNSUPPORTED_CC": "it was not built for this GPU",
    "OLD_CUDA_DRIVER": "the CUDA driver is too old for it: update the driver",
    "OLD_CUDA_RUNTIME": "the CUDA runtime is too old for it: update it",
    "INSUFFICIENT_GPU_MEMORY": "the GPU has too little memory for it: export smaller B, M or L",
    "MALFORMED_ENGINE": "it is no engine, or was cut short",
    "CUDA_ERROR": "CUDA failed: see whether other programs can use the GPU",
}


class EngineRuntime:
    """A library, ready to load engines."""

    def __init__(self, library: Library) -> None:
        trt = library.module
        self.library = library
        runtime = trt.Runtime(library.logger)
        if runtime is None:
            raise BackendError(
                f"{library.title} cannot start ({self.said()}), expected a usable CUDA driver; update it"
            )
        self._runtime = runtime

    def load(self, name: str, data: bytes, program: Program, cache: bytes | None) -> EngineExecutable:
        """Engine bytes → a program to run.

        Args:
            name: of the file, for messages.
            data: the file's bytes.
            program: what the engine is.
            cache: what `EngineExecutable.cache` gave in an earlier process.

        Raises:
            BundleError: they are no engine, or not one of this library, GPU and program.
        """
        library, runtime = self.library, self._runtime
        advice = f"build it again with `txl-deploy build --target {library.target}`"
        if reasons := self._invalid(data):
            raise BundleError(f"{name}: {library.title} cannot run it: {reasons}; {advice}")
        engine = runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise BundleError(f"{name}: {library.title} cannot load it ({self.said()}); {advice}")
        found = {}
        for index in range(engine.num_io_tensors):
            tensor = engine.get_tensor_name(index)
            mode, dtype = engine.get_tensor_mode(tensor), engine.get_tensor_dtype(tensor)
            found[str(tensor)] = (mode.name, DTYPES.get(dtype.name, dtype.name), tuple(engine.get_tensor_shape(tensor)))
        wanted = {spec.name: ("INPUT", spec.dtype, spec.fixed) for spec in program.inputs}
        wanted |= {spec.name: ("OUTPUT", spec.dtype, spec.fixed) for spec in program.outputs}
        for key in sorted(found.keys() | wanted.keys()):
            if found.get(key) != wanted.get(key):
                raise BundleError(f"{name}: {key} is {found.get(key)}, expected {wanted.get(key)}; {advice}")
        in_place = {}
        if library.facts.ring:
            for spec in program.outputs:
                shared = engine.get_aliased_input_tensor(spec.name)
                if shared:
                    in_place[spec.name] = str(shared)
        return EngineExecutable(library, engine, program, in_place, cache)

    def said(self) -> str:
        """What the library complained of, in one line."""
        said = " ".join(" ".join(self.library.journal.errors).split())
        return said[-400:] or "it does not say why"

    def _invalid(self, data: bytes) -> str:
        """Why a header says that an engine cannot run here; empty where it can, or where there is no telling."""
        problems = self.library.header_problems(self._runtime, data)
        if problems is None:
            return ""
        return ", ".join(REASONS.get(name, name) for name in problems) or "no usable CUDA driver was found"


class EngineExecutable:
    """A loaded engine. See `device.Executable`.

    TensorRT-RTX records its own CUDA graphs, per execution context and for as long as addresses stay the same; TensorRT
    is recorded from outside. In either case each tie has an execution context of its own.
    """

    def __init__(
        self, library: Library, engine: Any, program: Program, in_place: Mapping[str, str], cache: bytes | None
    ) -> None:
        self._library, self._engine, self.program, self.in_place = library, engine, program, in_place
        self.recordable = not library.facts.portable
        self._config: Any = None
        self._cache: Any = None
        if library.facts.portable:
            self._configure(cache)

    def prepare(self, addresses: Mapping[str, int], queue: Queue) -> Launch:
        """See `device.Executable`."""
        engine, library, name = self._engine, self._library, self.program.name
        context = engine.create_execution_context(self._config) if self._config else engine.create_execution_context()
        if context is None:
            raise BackendError(
                f"{name}: {library.title} made no execution context ({' '.join(library.journal.errors)[-300:]}), "
                "expected the GPU's memory to hold another one; close streams or other programs"
            )
        for tensor, address in addresses.items():
            if not context.set_tensor_address(tensor, address):
                raise BackendError(f"{name}: {library.title} took no address for {tensor}; build the engine again")
        handle = queue.handle

        def launch() -> None:
            if not context.execute_async_v3(handle):
                said = " ".join(" ".join(library.journal.errors).split())[-300:]
                raise BackendError(f"{name}: {library.title} failed ({said}), expected it to run; load the model again")

        return launch

    def cache(self) -> bytes | None:
        """What was compiled for this GPU, to be given to `EngineRuntime.load` by the next process."""
        if self._cache is None:
            return None
        cache = self._cache
        blob = cache.serialize()
        return None if blob is None else bytes(memoryview(blob))

    def _configure(self, blob: bytes | None) -> None:
        trt, engine = self._library.module, self._engine
        config = engine.create_runtime_config()
        config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        cache = config.create_runtime_cache()
        if blob:
            cache.deserialize(blob)  # refused, it stays empty: of another version, GPU or driver
        config.set_runtime_cache(cache)
        self._config, self._cache = config, cache
