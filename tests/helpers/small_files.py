"""ONNX files of a few nodes, as somebody else would have made them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def graph(
    path: Path, nodes: list[Any], inputs: dict[str, Any], outputs: dict[str, Any], constants: dict[str, Any]
) -> Path:
    """A small file; sizes that are texts are open."""
    kinds = {"x": TensorProto.FLOAT, "mode": TensorProto.BOOL, "sr": TensorProto.INT64}
    sides = [
        [helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), shape) for name, shape in side.items()]
        for side in (inputs, outputs)
    ]
    tensors = [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in constants.items()]
    made = helper.make_graph(nodes, "graph", *sides, tensors)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, path)
    return path


def leaky(path: Path, batch: int | str = "batch", size: int | str = 3, kept: float = 0.5) -> Path:
    """h' = kept · h + x, and y = tanh of it."""
    nodes = [
        helper.make_node("Mul", ["h", "kept"], ["faded"]),
        helper.make_node("Add", ["faded", "x"], ["h_new"]),
        helper.make_node("Tanh", ["h_new"], ["y"]),
    ]
    shape = [batch, size]
    return graph(path, nodes, {"x": shape, "h": shape}, {"y": shape, "h_new": shape}, {"kept": kept})
