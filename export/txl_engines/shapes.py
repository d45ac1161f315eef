"""Fixes the open sizes of a graph, so that no node computes a shape."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from txl_engines.checking import import_onnx

MOST_VALUES = 1 << 16
"""Maximum number of values of a result that is folded into a constant: 64 Ki values are at most 512 KiB in the
graph."""


def fix_sizes(model: Any, sizes: Mapping[str, int]) -> Any:
    """Fix a graph's open sizes by name, e.g. {"segment": 16}; values that depend only on sizes become constants."""
    fixed = deepcopy(model)
    graph = fixed.graph
    for value in (*graph.input, *graph.output):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param in sizes:
                size.dim_value = sizes[size.dim_param]
    del graph.value_info[:]
    _fold(graph, known_shapes(inferred(fixed, data_prop=True).graph))
    return fixed


def inferred(model: Any, data_prop: bool = False) -> Any:
    """Infer all shapes; for products with quantised matrices (MatMulNBits), which ONNX does not know, add them."""
    onnx = import_onnx()
    model_with_shapes = onnx.shape_inference.infer_shapes(model, data_prop=data_prop)
    products = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    while True:
        sizes = known_shapes(model_with_shapes.graph)
        ready = [node for node in products if sizes.get(node.input[0]) and all(sizes[node.input[0]])]
        unknown = [node for node in ready if not sizes.get(node.output[0]) or not all(sizes[node.output[0]])]
        if not unknown:
            return model_with_shapes
        for value in [
            value for value in model_with_shapes.graph.value_info if value.name in {node.output[0] for node in unknown}
        ]:
            model_with_shapes.graph.value_info.remove(value)
        for node in unknown:
            columns = next(attribute.i for attribute in node.attribute if attribute.name == "N")
            shape = (*sizes[node.input[0]][:-1], columns)
            value = onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, shape)
            model_with_shapes.graph.value_info.append(value)
        model_with_shapes = onnx.shape_inference.infer_shapes(model_with_shapes, data_prop=data_prop)


def known_shapes(graph: Any) -> dict[str, tuple[int, ...]]:
    """Return every value's shape as the graph states it; an open size is 0."""
    values = (*graph.value_info, *graph.input, *graph.output)
    return {value.name: tuple(size.dim_value for size in value.type.tensor_type.shape.dim) for value in values}


def _fold(graph: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Replace shapes, and integers computed from shapes and constants, by constants."""
    onnx = import_onnx()
    from onnx.reference import ReferenceEvaluator

    integers = (onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL)
    known: dict[str, NDArray[Any]] = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in graph.initializer
        if tensor.data_type in integers and not tensor.external_data
    }
    folded: set[str] = set()  # names of values that are computed from a shape
    remaining = []
    for node in graph.node:
        result = None
        if node.op_type == "Shape":
            ends: dict[str, int] = {attribute.name: attribute.i for attribute in node.attribute}
            sizes = shapes.get(node.input[0], ())[ends.get("start", 0) : ends.get("end")]
            if sizes and all(sizes):
                result = np.array(sizes, np.int64)
        elif len(node.output) == 1 and folded.intersection(node.input) and all(name in known for name in node.input):
            evaluated: Any = ReferenceEvaluator(node).run(None, {name: known[name] for name in node.input})
            result = np.asarray(evaluated[0])
        if result is None or result.size > MOST_VALUES or result.dtype not in (np.int64, np.int32, np.bool_):
            remaining.append(deepcopy(node))
            continue
        known[node.output[0]] = result
        folded.add(node.output[0])
    read = {name for node in remaining for name in node.input} | {value.name for value in graph.output}
    graph.initializer.extend(onnx.numpy_helper.from_array(known[name], name) for name in sorted(folded & read))
    del graph.node[:]
    graph.node.extend(remaining)
