"""The engine of the backend "cpu": ONNX Runtime."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from txl_runtime.bundle.bindings import Binding, check_bindings
from txl_runtime.bundle.open_batch import with_sequences
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import Program
from txl_runtime.errors import BackendError, BundleError, one_line
from txl_runtime.guard.graph_check import Walk, check_graph, imported_opset
from txl_runtime.host.engine import Engine
from txl_runtime.host.idle_masks import without_idle_masks
from txl_runtime.host.processor import sums_exactly
from txl_runtime.installing import pip_line
from txl_runtime.types import Arrays, Call
from txl_runtime.update_rules import wanted_version

SMALL = 2**18
"""Maximum number of products per row of a softmax that runs on one thread. Such a softmax takes 0.1 ms for 64 rows, and
needs no second pool of threads.
"""
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"

# Data types of a program's tensors, by ONNX Runtime's names.
DTYPES = {
    "tensor(int32)": "int32",
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(bool)": "bool",
}


class OnnxRuntimeCpu(Engine):
    """Sessions of ONNX Runtime, one per graph file, opened with the bundle; arrays are bound once and never copied.

    Programs that share a file share its session, and thereby one copy of the weights.

    Args:
        threads, lean, forms: see `txl_runtime.load`.
    """

    def __init__(
        self, bundle: Bundle, programs: Sequence[Program], threads: int | None, lean: bool, forms: str = "plain"
    ) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise BackendError(f"onnxruntime is not installed, backend cpu needs it; {pip_line('cpu')}") from None
        if bundle.manifest.precision == "bf16":
            raise BackendError(
                f"{bundle.path}: its precision is bf16, which backend cpu (ONNX Runtime) cannot run, expected fp32, "
                "fp16, int8 or int4; give --backend rtx, tensorrt or cuda, or export another precision "
                "(`txl-deploy verify` compares bf16 without a device)"
            )
        self._ort = onnxruntime
        self._takes_bytes = tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 21)
        self._bundle, self._threads, self._lean, self._forms = bundle, threads, lean, forms
        self._small_softmax = bundle.manifest.softmax_products <= SMALL
        # With `lean`, all sessions share one mapping of the weight file; otherwise each session would map the file.
        weights = bundle.file(bundle.manifest.weights)
        self._mapping = _map(weights) if lean else None
        self._shared: list[Any] = []  # keeps alive the values that sessions read
        # Open all graphs now, so that a graph that differs from the manifest is found before a stream runs.
        self._sessions: dict[str, Any] = {}
        self._idle_states: dict[str, Collection[str]] = {}
        for program in programs:
            if program.file not in self._sessions:
                self._sessions[program.file] = self._open(program)
            self._check(program)
        # Without prepacked weights, ONNX Runtime multiplies a single row in a different way, with different rounding.
        self.least_rows = 2 if lean else 1
        self.description = f"ONNX Runtime {onnxruntime.__version__} on the CPU"

    def bind(self, program: Program, inputs: Arrays, outputs: Arrays) -> Call:
        session = self._sessions[program.file]
        binding = session.io_binding()
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, self._value(array))
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, self._value(array))

        def call() -> None:
            try:
                session.run_with_iobinding(binding)
            except Exception as error:  # ONNX Runtime has a class of errors for each status code
                raise _failed(program, error) from None

        return call

    def kept(self, program: Program) -> Collection[str]:
        return self._idle_states[program.file]

    def run(self, program: Program, inputs: Arrays) -> Arrays:
        names = [spec.name for spec in program.outputs]
        try:
            results = self._sessions[program.file].run(names, dict(inputs))
        except Exception as error:  # ONNX Runtime has a class of errors for each status code
            raise _failed(program, error) from None
        return dict(zip(names, results, strict=True))

    def release_pages(self) -> None:
        """Release the mapped pages of the weight file, which only a lean engine has."""
        if self._mapping is not None and hasattr(mmap, "MADV_DONTNEED"):  # Windows has no MADV_DONTNEED
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def _value(self, array: NDArray[Any]) -> Any:
        if not array.flags.c_contiguous:
            raise BackendError("an array to bind is not C-contiguous, expected a plain array; bind a copy of it")
        return self._ort.OrtValue.ortvalue_from_numpy(array)

    def _open(self, program: Program) -> Any:
        options = self._ort.SessionOptions()
        options.log_severity_level = 3
        options.inter_op_num_threads = 1
        if self._small_softmax and (program.kind == "head" or program.kind.startswith("tail.")):
            options.intra_op_num_threads = 1
        elif self._threads is not None:
            options.intra_op_num_threads = self._threads
        # An arena makes a decode step 8 % faster, but keeps the peak memory of a segment. That is worth it for the
        # layers. For the softmax, an arena would keep memory for rows of the whole vocabulary.
        options.enable_cpu_mem_arena = program.kind in ("hidden", "step") and not self._lean
        # Without this setting, ONNX Runtime only warns if a shape in the file differs from the inferred shape.
        options.add_session_config_entry("session.strict_shape_type_inference", "1")
        # On x86 without VNNI, pairs of int8 products are summed in 16 bits, which 2 · 255 · 127 overflows. The setting
        # asks for an exact product. With VNNI the product is exact anyway, and the setting would make it take 2.2 times
        # as long.
        options.add_session_config_entry("session.x64quantprecision", "0" if sums_exactly() else "1")
        # After a run, the threads of a pool spin for a moment. The next step then starts at once (5 % of a decode
        # step), but a softmax with its own pool must share the cores with the spinning threads (a softmax of all words
        # takes 40 % longer).
        if self._lean or not self._small_softmax:
            options.add_session_config_entry("session.force_spinning_stop", "1")
        if program.update == "rolled":
            # In the graph's order, new memory is written layer by layer. ONNX Runtime's default order writes it at the
            # end, and keeps the rows of all layers until then: 0.65 GiB and a fifth of the time at 24 layers and 3800
            # memory rows.
            options.execution_order = self._ort.ExecutionOrder.PRIORITY_BASED
        if self._lean:
            options.add_session_config_entry("session.disable_prepacking", "1")
            options.enable_mem_pattern = False  # a memory pattern allocates one block as large as the peak of a run
        path, graph = self._bundle.file(program.file), self._bundle.read(program.file)
        walk = check_graph(graph, str(path), program, self._bundle.manifest)
        self._idle_states[program.file] = ()
        # ONNX Runtime before 1.21 accepts no folder for the weights, so it gets the graph's path, and the graph must be
        # unchanged.
        if self._takes_bytes and self._forms == "fast":
            graph, self._idle_states[program.file] = without_idle_masks(graph, walk, self._bundle.manifest)
        for name, tensor in self._parameters(walk).items():
            self._shared.append(self._value(tensor))
            options.add_initializer(name, self._shared[-1])
        if self._takes_bytes:
            options.add_session_config_entry(WEIGHTS_FOLDER, os.fsencode(self._bundle.folder.place))
        try:
            session = self._ort.InferenceSession(
                graph if self._takes_bytes else str(path),
                options,
                providers=["CPUExecutionProvider"],
                enable_fallback=False,  # a fallback prints to the terminal and tries the same provider again
            )
        except Exception as error:  # ONNX Runtime has a class of errors for each status code
            able = "a graph ONNX Runtime can load"
            installed = self._ort.__version__
            if wanted := wanted_version(imported_opset(graph)["ai.onnx"], installed, program.update):
                able = wanted
            elif "Only 4b quantization" in str(error):
                able = f"ONNX Runtime 1.22 or newer for 8-bit weights, and this is {installed}; install that"
            raise BundleError(f"{path}: {one_line(error)}; expected {able}") from None
        return session

    def _parameters(self, walk: Walk) -> dict[str, NDArray[Any]]:
        """Return the parameters that lean sessions share, as views of the mapped file; {} without `lean`."""
        if self._mapping is None:
            return {}
        return walk.parameters(np.frombuffer(self._mapping, np.uint8))

    def _check(self, program: Program) -> None:
        """Check that a session has the program's inputs and outputs. In the session, the segment length may be open,
        and with `open_batch` the batch size.
        """
        session = self._sessions[program.file]
        inputs, outputs = (
            [Binding(item.name, DTYPES.get(item.type, item.type), tuple(item.shape)) for item in side]
            for side in (session.get_inputs(), session.get_outputs())
        )
        where = str(self._bundle.file(program.file))
        if program.open_batch:
            program = with_sequences(program, self._bundle.manifest)
        check_bindings(where, inputs, outputs, program, "export the model again", open_size="segment")


def _failed(program: Program, error: Exception) -> BackendError:
    return BackendError(f"program {program.name} failed in ONNX Runtime: {one_line(error)}")


def _map(path: Path) -> mmap.mmap | None:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else None
