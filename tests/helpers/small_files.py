"""ONNX files of a few nodes, as somebody else would have made them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from small_graphs import FLOAT, model, value

Sizes = Mapping[str, Sequence[Any]]
KINDS = {"mode": TensorProto.BOOL, "sr": TensorProto.INT64}


def graph(path: Path, nodes: Sequence[Any], inputs: Sizes, outputs: Sizes, constants: Mapping[str, Any]) -> Path:
    """A small file; sizes that are texts are open, constants are float32."""
    sides = [[value(name, shape, KINDS.get(name, FLOAT)) for name, shape in side.items()] for side in (inputs, outputs)]
    tensors = [numpy_helper.from_array(np.asarray(one, np.float32), name) for name, one in constants.items()]
    onnx.save(model(nodes, *sides, tensors, opset=13), path)
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
