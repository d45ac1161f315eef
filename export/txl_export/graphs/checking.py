"""Checks a written graph against the ONNX standard and against its program in the manifest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx.external_data_helper import uses_external_data
from txl_runtime.bundle.bindings import Binding, check_bindings
from txl_runtime.bundle.reading import WEIGHTS
from txl_runtime.bundle.tables import Program
from txl_runtime.errors import TxlError

from txl_export.graphs.quantised_matmul import MICROSOFT


def check_graph(path: Path, program: Program, opset: int) -> None:
    """Check a written graph with ONNX's checker, and its names, shapes, dtypes and opset against its program.

    Indices must be int32, except in own modules, and weights must lie in the bundle's weight file. A ring's graph may
    leave the segment's length open.

    Raises:
        TxlError: the graph violates the standard or differs from its program.
    """
    try:
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(str(path), load_external_data=False)
        typed = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise TxlError(f"{path.name}: {' '.join(str(error).split())}; expected a valid graph; report this") from None
    versions = {entry.domain: entry.version for entry in model.opset_import}
    if versions.pop("", 0) != opset or versions not in ({}, {MICROSOFT: 1}):
        raise TxlError(f"{path.name}: uses other opsets than {opset} of the standard: {versions}; report this")
    inputs, outputs = ([_binding(value) for value in side] for side in (model.graph.input, model.graph.output))
    open_size = "segment" if program.update == "ring" else None
    check_bindings(path.name, inputs, outputs, program, "report this", order=True, open_size=open_size)
    wide = [] if program.kind == "step" else _wide_indices(typed.graph)  # own modules have indices of any type
    if wide:
        raise TxlError(f"{path.name}: {', '.join(wide)} gather by other indices than int32; report this")
    stray = {
        entry.value
        for tensor in model.graph.initializer
        if uses_external_data(tensor)
        for entry in tensor.external_data
        if entry.key == "location"
    } - {WEIGHTS}
    if stray:
        raise TxlError(f"{path.name}: points into {sorted(stray)}, expected the bundle's weights alone; report this")


def _wide_indices(graph: onnx.GraphProto) -> list[str]:
    """Return the names of nodes that gather with indices other than int32."""
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input)}
    kinds |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    gathers = [node for node in graph.node if node.op_type in ("Gather", "GatherElements")]
    return [node.name for node in gathers if kinds.get(node.input[1]) != onnx.TensorProto.INT32]


def _binding(value: onnx.ValueInfoProto) -> Binding:
    kind = value.type.tensor_type
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)).name
    return Binding(value.name, dtype, tuple(dim.dim_param or dim.dim_value for dim in kind.shape.dim))
