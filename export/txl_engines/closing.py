"""Fixes an open B in a step's graph, which then is the graph that it was before the export opened it.

For the bundle's own B this is the captured graph, so engines are the same as from a graph that was never open. Only the
order of numbers that export computed from B may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from txl_runtime.bundle.open_batch import OPENED
from txl_runtime.bundle.tables import Program

from txl_engines.checking import import_onnx
from txl_engines.shapes import inferred, known_shapes


def closed(model: Any, declared: Iterable[Any], program: Program) -> bytes:
    """Fix the batch size of a graph that leaves it open (`open_batch`); return the graph's bytes.

    Args:
        model: the graph; it is changed.
        declared: types and shapes that the graph gave to inner values while its batch size was open.
        program: the program with its sizes fixed.
    """
    onnx, graph = import_onnx(), model.graph
    constants: dict[str, Any] = {tensor.name: tensor for tensor in graph.initializer}
    sizes = known_shapes(inferred(model).graph)
    sizes |= {name: tuple(tensor.dims) for name, tensor in constants.items()}
    names, parts, written = dict[str, str](), [], set[str]()
    for node in graph.node:
        if node.op_type == "Slice" and _before(node.output[0]) and _same(sizes, node.input[0], node.output[0]):
            names[node.output[0]] = node.input[0]  # the Slice takes the whole constant
            parts.append(node)
        elif node.op_type in ("Reshape", "Expand") and _before(node.input[1]) and node.input[1] in constants:
            tensor = constants[node.input[1]]
            if tensor.name not in written and _write_sizes(node, tensor, sizes.get(node.output[0], ())):
                written.add(tensor.name)
            if tensor.name in written and node.op_type == "Reshape" and not node.attribute:
                node.attribute.append(onnx.helper.make_attribute("allowzero", 1))
    for node in parts:
        graph.node.remove(node)
    for name, tensor in constants.items():
        before = _before(name)
        if before in constants and _same(sizes, before, name):
            names[name] = before
        elif before and before not in (constants.keys() | names.values()):
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
        if name in inside and all(sizes.get(name, (0,))):
            inside.remove(name)
            kind = value.type.tensor_type.elem_type
            graph.value_info.append(onnx.helper.make_tensor_value_info(name, kind, sizes[name]))
    onnx.helper.set_model_props(model, {"txl-deploy.program": program.note()})
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def _before(name: str) -> str:
    """Return the name of the constant that a value replaces, read from the value's name; "" for other values."""
    before, _, number = name.rpartition(OPENED)
    return before if not number or number.isdecimal() else ""


def _same(sizes: Mapping[str, tuple[int, ...]], one: str, other: str) -> bool:
    return one in sizes and sizes[one] == sizes.get(other)


def _write_sizes(node: Any, tensor: Any, sizes: tuple[int, ...]) -> bool:
    """Write known sizes in place of a Reshape's 0 or -1, or an Expand's 1; return whether the sizes were known."""
    onnx = import_onnx()
    numbers = onnx.numpy_helper.to_array(tensor)
    if len(sizes) != len(numbers) or not all(sizes):
        return False
    put = 1 if node.op_type == "Expand" else 0 if 0 in numbers else -1
    whole = np.where(numbers == put, np.array(sizes, numbers.dtype), numbers)
    tensor.CopyFrom(onnx.numpy_helper.from_array(whole, tensor.name))
    return True
