"""Writes products with quantised matrices as ONNX Runtime's own operators.

For few rows at a time (decoding) a product is one operator, MatMulNBits, which takes as long as reading the weights.
For many rows an int8 product is written around a product of integers. This form is twice as fast for many rows, and
three times slower for one row:

    scale = max |x| of the row / 127        code = round(x / scale) + 128        y = scale · (code - 128) @ W

In both forms every row (token) of activations has its own scale, so rows do not influence one another. ONNX Runtime's
dynamic quantiser has one scale per tensor, so padding and neighbours would change a stream's results. A row of zeros
has scale 0, and its product is 0 for any codes. After a ReLU no activation is negative, so codes are 0 … 255 without an
offset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from torch import Tensor
from txl_runtime.bundle.tables import Program

from txl_export.graphs.quantising import BITS, COLUMNS, QUANTISED, block_of

MICROSOFT = "com.microsoft"

MANY = 16
"""Number of rows from which the integer product is faster."""

FEW = "-few.onnx"
"""Ending of the files into which `apart` moves programs of few rows."""


def has_many_rows(program: Program) -> bool:
    """Return whether a program multiplies at least `MANY` rows at a time; an open B counts as 1.

    The answer for a rolled program is no, because its rows have two axes.
    """
    batch, length = program.inputs[0].shape
    return program.update == "ring" and (1 if program.open_batch else int(batch)) * int(length) >= MANY


def apart(programs: Sequence[Program]) -> tuple[Program, ...]:
    """Return the programs; each program of few rows that shared a file with one of many rows gets a separate file."""
    shared = {program.file for program in programs if has_many_rows(program)}
    return tuple(
        msgspec.structs.replace(program, file=program.file.replace(".onnx", FEW))
        if program.file in shared and not has_many_rows(program)
        else program
        for program in programs
    )


def whole_of(file: str) -> str:
    """Return the file from which `apart` moved the program of `file`; both files are traced from the same network."""
    return file.replace(FEW, ".onnx")


def multiply_quantised(graph: ir.Graph, parts: Mapping[str, Tensor], many: bool) -> None:
    """Replace products with quantised matrices by ONNX Runtime's operators, in place.

    For example, x [2, 5, 32] times a matrix [32, 96] whose parts are codes and scales.

    Args:
        graph: the graph; its initializers have the parameters' names, with "/" for ".".
        parts: the quantised parameters.
        many: write int8 products in the form for many rows.
    """
    zeros: ir.Value | None = None
    for node in list(graph):
        matrix = node.inputs[1] if node.op_type == "MatMul" else None
        if matrix is None or matrix.const_value is None or matrix.name is None:
            continue
        name = matrix.name.replace("/", ".")
        if f"{name}.shape" not in parts:
            continue
        if many and f"{name}.{COLUMNS}" in parts:
            if zeros is None:
                before = _zero_points(graph, node.inputs[0])
                graph.insert_before(node, before)
                zeros = before[-1].outputs[0]
            nodes = _by_rows(graph, node.inputs[0], name, parts, zeros)
        else:
            nodes = [_by_blocks(graph, node.inputs[0], name, parts)]
        graph.opset_imports[MICROSOFT] = 1
        original, result = node.outputs[0], nodes[-1].outputs[0]
        result.name, result.type, result.shape = original.name, original.type, original.shape
        original.name = f"{original.name}.float"
        ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, [original], [result])
        if not matrix.uses() and matrix.name in graph.initializers:
            del graph.initializers[matrix.name]


def _by_blocks(graph: ir.Graph, x: ir.Value | None, name: str, parts: Mapping[str, Tensor]) -> ir.Node:
    precision = next(precision for precision in QUANTISED if f"{name}.{precision}" in parts)
    size, width = (int(n) for n in parts[f"{name}.shape"])
    stored = [f"{name}.{part}" for part in (precision, "scale", "zero") if f"{name}.{part}" in parts]
    inputs = [x, *(initializer(graph, part, parts[part].numpy()) for part in stored)]
    # Accuracy level 4: integer products, with activations' scales per row and block.
    attributes = {"K": size, "N": width, "bits": BITS[precision], "block_size": block_of(size), "accuracy_level": 4}
    return ir.node("MatMulNBits", inputs, attributes=attributes, domain=MICROSOFT)


def _zero_points(graph: ir.Graph, x: ir.Value | None) -> Sequence[ir.Node]:
    """Return nodes that make [128, 128, …], one per row of x; all products of a graph have the same rows."""
    shape = ir.node("Shape", [x], attributes={"start": 0, "end": 1})
    value = ir.tensor(np.array([128], np.uint8))
    return shape, ir.node("ConstantOfShape", [shape.outputs[0]], attributes={"value": value})


def _by_rows(
    graph: ir.Graph, x: ir.Value | None, name: str, parts: Mapping[str, Tensor], zeros: ir.Value
) -> Sequence[ir.Node]:
    """Write the int8 product [rows, in] → [rows, out] for many rows; return its nodes."""
    assert x is not None
    source = x.producer()
    positive = source is not None and source.op_type == "Relu"
    axis = initializer(graph, "rows.axis", np.array([1], np.int64))
    most = 255 if positive else 127
    step = initializer(graph, f"rows.step.{most}", np.float32(1 / most))
    size = [] if positive else [ir.node("Abs", [x])]
    largest = ir.node("ReduceMax", [size[0].outputs[0] if size else x, axis], attributes={"keepdims": 0})
    scale = ir.node("Mul", [largest.outputs[0], step])
    offsets = [] if positive else [zeros]
    codes = ir.node("QuantizeLinear", [x, scale.outputs[0], *offsets], attributes={"axis": 0})
    stored = [f"{name}.{part}" for part in (COLUMNS, "column_scale")]
    columns, column_scale = (initializer(graph, part, parts[part].numpy()) for part in stored)
    offset = [] if positive else [initializer(graph, "rows.zero", np.uint8(128))]
    one = initializer(graph, "rows.one", np.float32(1))
    product = ir.node("MatMulIntegerToFloat", [codes.outputs[0], columns, one, column_scale, *offset], domain=MICROSOFT)
    column = ir.node("Unsqueeze", [scale.outputs[0], axis])
    result = ir.node("Mul", [product.outputs[0], column.outputs[0]])
    return *size, largest, scale, codes, product, column, result


def initializer(graph: ir.Graph, name: str, value: NDArray[np.generic] | np.generic) -> ir.Value:
    """Return the graph's initializer with that value; add it if it is missing, with dots appended to a taken name.

    For example, `initializer(graph, "axes", np.array([1]))`.
    """
    array = np.asarray(value)
    while name in graph.initializers and not _holds(graph.initializers[name], array):
        name += "."  # a model's parameter may already have the name
    if name not in graph.initializers:
        tensor = ir.tensor(array, name=name)
        shape, kind = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
        graph.register_initializer(ir.Value(name=name, type=kind, shape=shape, const_value=tensor))
    return graph.initializers[name]


def _holds(value: ir.Value, array: NDArray[np.generic]) -> bool:
    content = None if value.const_value is None else value.const_value.numpy()
    return content is not None and content.dtype == array.dtype and np.array_equal(content, array)
