"""Folding as the helper process does it, in this process."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx_ir as ir
import onnxruntime
from txl_export.families.graph.take.running import RunError


def fold(model: ir.Model) -> ir.Model:
    """The graph with constants computed.

    Raises:
        RunError: ONNX Runtime does not open it.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / "folded.onnx")
        try:
            given = ir.to_proto(model).SerializeToString()
            onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime raises its own kinds, one per status code
            raise RunError(str(error)) from None
        return ir.from_proto(ir.to_proto(ir.load(options.optimized_model_filepath)))
