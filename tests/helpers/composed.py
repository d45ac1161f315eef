"""Composed programs of a bundle in ONNX Runtime, and segments to run them on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from txl_engines.composing import compose
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.bundle.tables import Program
from txl_runtime.host.placements import open_placements
from txl_runtime.streaming.state import SequenceCounters, initial_values
from txl_runtime.types import Arrays

ANYTHING = np.array([-(2**31), -1, 60, 2**31 - 1])

FOLDER = "session.model_external_initializers_file_folder_path"


def run_graph(graph: bytes, folder: Path, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """All outputs of a graph whose weights lie in a folder, each node computed as it stands."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    options.add_session_config_entry(FOLDER, str(folder))
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


class Runner:
    """A composed program in ONNX Runtime, with a memory of its own, kept as the runtime keeps it."""

    def __init__(self, folder: Path, program: Program) -> None:
        bundle = open_bundle(folder, verify_files=False)
        path = folder / f"composed-{program.file}"
        path.write_bytes(compose(bundle, program))
        states = bundle.manifest.states_of(program.update)
        self.program, self.counters = program, SequenceCounters(bundle.manifest, states)
        self.placements = open_placements(states, initial_values(bundle), self.counters)
        self.rows = np.arange(bundle.manifest.batch_size)
        for part in (*self.placements, self.counters):
            part.clear(self.rows)
        self.returned: dict[str, NDArray[Any]] = {}
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.strict_shape_type_inference", "1")
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        for side, found in ((program.inputs, self.session.get_inputs()), (program.outputs, self.session.get_outputs())):
            assert [(spec.name, list(spec.shape)) for spec in side] == [(item.name, item.shape) for item in found]

    def __call__(
        self, tokens: NDArray[Any], valid: NDArray[Any], targets: NDArray[Any] | None, **more: NDArray[Any]
    ) -> NDArray[np.float32]:
        """One segment; the first thing the program returns, all of it is in `returned`; its memory goes on."""
        bound, after = dict[str, Any](), dict[str, Any]()
        for placement in self.placements:
            inputs, outputs = placement.bound(self.program, self.counters.side)
            bound, after = bound | inputs, after | outputs
        counts = {"valid": valid, "fill": self.counters.fill, "head": self.counters.head}
        given = {"tokens": tokens, "targets": targets, **more, **counts, **bound}
        for spec in self.program.outputs:
            if spec.name not in after:
                self.returned[spec.name] = np.full(spec.fixed, -1 if spec.dtype == "int32" else np.nan, spec.dtype)
        binding = self.session.io_binding()
        wrap = onnxruntime.OrtValue.ortvalue_from_numpy
        for spec in self.program.inputs:
            array = given[spec.name]
            assert array is not None
            assert array.dtype == spec.dtype
            binding.bind_ortvalue_input(spec.name, wrap(array))
        for name, array in {**self.returned, **after}.items():
            binding.bind_ortvalue_output(name, wrap(array))
        self.session.run_with_iobinding(binding)
        self.counters.valid[:] = valid
        self.counters.advance(len(self.rows), self._spill)
        return self.returned[self.program.outputs[0].name]

    def newest(self, row: int) -> Arrays:
        """The memory rows of one sequence; none of a model without memory."""
        taken = (placement.take(row, int(self.counters.fill[row]), None) for placement in self.placements)
        return {name: rows for tensors in taken for name, rows in tensors.items()}

    def _spill(self, row: int, count: int) -> None:
        for placement in self.placements:
            placement.spill(row, count)


def segments(batch: int, length: int, count: int = 9) -> list[tuple[NDArray[np.int32], NDArray[np.int32]]]:
    """Full, partial and idle ones; memory is empty, filling and rolled over."""
    draws = np.random.default_rng(length)
    made = []
    for number in range(count):
        valid = draws.integers(0, length + 1, batch) if number % 2 else np.full(batch, length)
        made.append((draws.integers(0, 41, (batch, length + 1)).astype(np.int32), valid.astype(np.int32)))
    return made


def spoiled(ids: NDArray[np.int32], valid: NDArray[np.int32], seed: int) -> NDArray[np.int32]:
    """The same where it counts, anything in the padding."""
    anything = np.random.default_rng(seed).choice(ANYTHING, ids.shape)
    return np.where(np.arange(ids.shape[1]) < valid[:, None], ids, anything).astype(np.int32)
