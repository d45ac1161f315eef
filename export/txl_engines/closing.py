"""A step's graph whose B was open and is fixed again: it becomes what it was before export opened it.

Where B is the bundle's, that is the graph that was captured, so that its engines are those of a graph that never was
open. Only where export had to compute numbers from B are they in another order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from txl_runtime.bundle.open_batch import OPENED
from txl_runtime.bundle.tables import Program

from txl_engines.checking import import_onnx
from txl_engines.shapes import known_shapes


def closed(model: Any, declared: Iterable[Any], program: Program) -> bytes:
    """The bytes of a graph that leaves no size open any more.

    Args:
        model: the graph; it is changed.
        declared: what it said of values inside while B was open.
        program: which it is now.
    """
    onnx, graph = import_onnx(), model.graph
    sizes = known_shapes(onnx.shape_inference.infer_shapes(model).graph)
    constants: dict[str, Any] = {tensor.name: tensor for tensor in graph.initializer}
    sizes |= {name: tuple(tensor.dims) for name, tensor in constants.items()}
    names, parts, written = dict[str, str](), [], set[str]()
    for node in graph.node:
        if node.op_type == "Slice" and OPENED in node.output[0] and sizes[node.input[0]] == sizes[node.output[0]]:
            names[node.output[0]] = node.input[0]  # all entries of a constant
            parts.append(node)
        elif node.op_type in ("Reshape", "Expand") and OPENED in node.input[1] and node.input[1] in constants:
            if not node.attribute and node.op_type == "Reshape":
                node.attribute.append(onnx.helper.make_attribute("allowzero", 1))
            if node.input[1] not in written:
                _write_sizes(node, constants[node.input[1]], sizes[node.output[0]])
                written.add(node.input[1])
    for node in parts:
        graph.node.remove(node)
    for name, tensor in constants.items():
        before = name.partition(OPENED)[0]
        if before in constants and before != name and sizes[before] == sizes[name]:
            names[name] = before
        elif before not in (constants.keys() | names.values()):
            names[name] = tensor.name = before
            sizes[before] = sizes[name]
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    read = {name for node in graph.node for name in node.input}
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in read]:
        graph.initializer.remove(tensor)
    inside = {name for node in graph.node for name in (*node.input, *node.output)}
    inside -= {value.name for value in (*graph.input, *graph.output)}
    for value in declared:
        name = names.get(value.name, value.name)
        if name in inside:
            inside.remove(name)
            kind = value.type.tensor_type.elem_type
            graph.value_info.append(onnx.helper.make_tensor_value_info(name, kind, sizes[name]))
    onnx.helper.set_model_props(model, {"txl-deploy.program": msgspec.json.encode(program).decode()})
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def _write_sizes(node: Any, tensor: Any, sizes: tuple[int, ...]) -> None:
    """Write into a shape the sizes for which a number stood that says "as it is" or "what is left"."""
    onnx = import_onnx()
    numbers = onnx.numpy_helper.to_array(tensor)
    open_ = 1 if node.op_type == "Expand" else 0 if 0 in numbers else -1
    if len(sizes) == len(numbers) and all(sizes):
        whole = np.where(numbers == open_, np.array(sizes, numbers.dtype), numbers)
        tensor.CopyFrom(onnx.numpy_helper.from_array(whole, tensor.name))
