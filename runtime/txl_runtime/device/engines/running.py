"""Classes that load and run engines with TensorRT or TensorRT-RTX: the part of the libraries that a loaded model uses.

As in `library`, features come from the version's facts, and variables are named after their class, so that a test can
check every used member against every version.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from txl_runtime.bundle.bindings import check_bindings
from txl_runtime.bundle.engines.sidecar import GivenWeight, with_weights
from txl_runtime.bundle.tables import Program
from txl_runtime.device.cuda import Block, Queue
from txl_runtime.device.engines.library import ERROR, Library
from txl_runtime.device.engines.weights import SharedWeights
from txl_runtime.device.interface import Executable, Launch
from txl_runtime.errors import BackendError, BundleError, one_line

logger = logging.getLogger(__name__)

REASONS = {
    "VERSION_MISMATCH": "it was built by another version of the library",
    "UNSUPPORTED_CC": "it was not built for this GPU",
    "OLD_CUDA_DRIVER": "the CUDA driver is too old for it: update the driver",
    "OLD_CUDA_RUNTIME": "the CUDA runtime is too old for it: update it",
    "INSUFFICIENT_GPU_MEMORY": "the GPU has too little memory for it: export smaller B, M or L",
    "MALFORMED_ENGINE": "it is no engine, or was cut short",
    "CUDA_ERROR": "CUDA failed: see whether other programs can use the GPU",
}
"""Messages for users about faults of an engine's header, by the library's names of the faults."""


class EngineRuntime:
    """A library's runtime, which loads engines."""

    def __init__(self, library: Library) -> None:
        trt = library.module
        self.library = library
        library.journal.forget()
        try:
            runtime = trt.Runtime(library.logger)
        except Exception as error:  # when CUDA fails, the library returns nothing, and its bindings raise a TypeError
            library.journal.add(ERROR, one_line(error))
            runtime = None
        if runtime is None:
            raise BackendError(
                f"{library.title} cannot start ({self.said()}), expected a usable CUDA driver; update it"
            )
        self._runtime = runtime

    def load(
        self,
        name: str,
        data: bytes,
        program: Program,
        cache: bytes | None,
        given_memory: bool,
        given: Sequence[GivenWeight] = (),
    ) -> EngineExecutable:
        """Load an engine from the bytes of its file.

        Args:
            cache: kernels that `EngineExecutable.cache` returned in an earlier process.
            given_memory, given: see `Identity`.

        Raises:
            BackendError: the library failed.
            BundleError: the bytes are no engine, or an engine for a different library, GPU or program.
        """
        library, runtime = self.library, self._runtime
        advice = f"build it again with `txl-deploy build --target {library.target}`"
        with library.speaking(name):
            problems = library.header_problems(runtime, data)
            if problems is not None:
                reasons = ", ".join(REASONS.get(problem, problem) for problem in problems)
                why = reasons or "no usable CUDA driver was found"
                raise BundleError(f"{name}: {library.title} cannot run it: {why}; {advice}")
            engine = runtime.deserialize_cuda_engine(data)
            if engine is None:
                raise BundleError(f"{name}: {library.title} cannot load it ({self.said()}); {advice}")
            check_bindings(name, *library.bindings(engine), with_weights(program, given), advice)
            outputs = [spec.name for spec in program.outputs if library.facts.ring]
            aliases = {output: engine.get_aliased_input_tensor(output) for output in outputs}
            in_place = {output: str(shared) for output, shared in aliases.items() if shared}
            return EngineExecutable(library, engine, program, in_place, cache, given_memory, given)

    def said(self) -> str:
        """Return the library's complaints as one line."""
        return self.library.journal.complaints() or "it does not say why"


class EngineExecutable(Executable):
    """A loaded engine. See `device.interface.Executable`.

    The loop records the engine's work, with the addresses of an execution context. If the loop cannot record it,
    TensorRT-RTX records the work itself, one record for each context whose addresses stay the same. So with either
    library each set of addresses has its own context.

    Attributes:
        resumed: whether the library accepted kept kernels.
        working_bytes: bytes of working memory that the engine has to be given; 0 if it allocates its own.
        workspace: the given working memory. Engines that run one after the other may share it.
        given: weights that the engine takes as inputs.
        weights: the device memory of these weights.
    """

    workspace: Block | None = None
    weights: SharedWeights | None = None

    def __init__(
        self,
        library: Library,
        engine: Any,
        program: Program,
        in_place: Mapping[str, str],
        kernels: bytes | None,
        given_memory: bool,
        given: Sequence[GivenWeight],
    ) -> None:
        self.given = given
        self._library, self._engine, self.program, self.in_place = library, engine, program, in_place
        self.recordable = given_memory or not library.facts.portable
        config: Any = None
        cache: Any = None
        self.resumed, self.working_bytes = False, 0
        if library.facts.portable:
            trt = library.module
            config = engine.create_runtime_config()
            config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            if given_memory:
                config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED
                config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
                self.working_bytes = int(engine.device_memory_size_v2)
            cache = config.create_runtime_cache()
            if kernels:
                self.resumed = self._resume(cache, kernels)
            config.set_runtime_cache(cache)
        self._config, self._cache = config, cache

    def _resume(self, cache: Any, kernels: bytes) -> bool:
        """Give the library kept kernels; return False if it refuses them, as for a different version, GPU or driver."""
        try:
            accepted = bool(cache.deserialize(kernels))
            complaints = self._library.journal.complaints()
        except Exception as error:  # an exception of the bindings counts as a refusal
            accepted, complaints = False, one_line(error)
        if not accepted:
            name, because = self.program.name, f" ({complaints})" if complaints else ""
            logger.info("%s: kept kernels do not fit this GPU and driver%s, they are compiled again", name, because)
        return accepted

    def prepare(self, addresses: Mapping[str, int], queue: Queue) -> Launch:
        with self._library.speaking(self.program.name):
            return self._prepare(addresses, queue)

    def _prepare(self, addresses: Mapping[str, int], queue: Queue) -> Launch:
        engine, library, name = self._engine, self._library, self.program.name
        context = engine.create_execution_context(self._config) if self._config else engine.create_execution_context()
        if context is None:
            raise BackendError(
                f"{name}: {library.title} made no execution context ({library.journal.complaints()}), "
                "expected the GPU's memory to hold another one; close streams or other programs"
            )
        handle, forget, workspace = queue.handle, library.journal.forget, self.workspace
        if workspace is not None:
            forget()
            context.set_device_memory(workspace.address, workspace.size)
            if said := library.journal.complaints():  # set_device_memory has no return value
                raise BackendError(
                    f"{name}: {library.title} refused {workspace.size} bytes of device memory to work in ({said}), "
                    f"expected it to need {self.working_bytes}; build the engine again"
                )
        if self.weights is not None:
            addresses = {**addresses, **self.weights.addresses(self.given)}
        for tensor, address in addresses.items():
            if not context.set_tensor_address(tensor, address):
                raise BackendError(f"{name}: {library.title} took no address for {tensor}; build the engine again")
        if self.recordable and library.facts.portable and not context.is_stream_capturable(handle):
            logger.warning(
                "%s: %s says that it cannot be recorded from outside, so it records itself", name, library.title
            )
            trt, config = library.module, self._config
            self.recordable, config.cuda_graph_strategy = False, trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            return self._prepare(addresses, queue)

        def launch() -> None:
            forget()
            try:
                done, complaints = context.execute_async_v3(handle), ""
            except Exception as error:  # the library's bindings raised it
                done, complaints = False, one_line(error)
            if not done:
                complaints = " ".join(part for part in (library.journal.complaints(), complaints) if part)
                raise BackendError(
                    f"{name}: {library.title} failed ({complaints}), expected it to run; load the model again"
                )

        return launch

    def cache(self) -> bytes | None:
        """Return the kernels compiled so far, for `EngineRuntime.load` in the next process; None if there are none."""
        cache = self._cache
        with self._library.speaking(self.program.name):
            blob = None if cache is None else cache.serialize()
            return None if blob is None else bytes(memoryview(blob))
