"""Small graphs for passes: made with the shapes that a pass needs, run as they are, and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import small_graphs
from onnx import TensorProto, helper, numpy_helper


def small(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Sequence[Any]],
    constants: Mapping[str, Any],
    results: Sequence[str] = ("y",),
) -> ir.Model:
    """A graph of float32 whose values have shapes; inputs by name, with their sizes."""
    sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes) for name, sizes in inputs.items()]
    made = [numpy_helper.from_array(np.asarray(values), name) for name, values in constants.items()]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results]
    model = small_graphs.model(nodes, sides, outputs, made)
    return ir.from_proto(onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True))


def run(model: ir.Model, feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    return session.run(None, dict(feed))


def kinds(model: ir.Model) -> Counter[str]:
    """Count the nodes of each operator."""
    return Counter(node.op_type for node in model.graph)
