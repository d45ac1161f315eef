"""Rewrites operators on quantised numbers as operators on floats between quantisers.

E.g. QLinearAdd(a, b) becomes QuantizeLinear(Add(DequantizeLinear(a), DequantizeLinear(b))). ONNX Runtime fuses these
to its own operator when it opens the graph; other engines see standard operators. Bundles contain no QLinearConv,
because ONNX Runtime 1.20 reads beyond the end of its bias, and no QLinearMatMul, because ONNX Runtime with exact sums
on x86 without VNNI opens no product of int8 by int8.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from txl_runtime.guard.forms import MICROSOFT

from txl_export.graphs.quantised_matmul import initializer

_OWN = ("QGemm", *(f"QLinear{name}" for name in ("Add", "Concat", "LeakyRelu", "Mul", "Sigmoid", "Softmax")))
OPERATORS = ("QLinearConv", "QLinearMatMul", *(f"{MICROSOFT}::{name}" for name in _OWN))
"""The operators that are rewritten; the names of ONNX Runtime's own operators begin with its domain."""


def between_quantisers(graph: ir.Graph, node: ir.Node) -> None:
    """Replace a QLinear operator by the float operator between quantisers, where its sizes and scales allow it.

    Quantised numbers are uint8 or int8, scales float32. A weight has one scale or one per column.
    """
    attributes = dict(node.attributes)
    if "opset" in attributes and attributes.pop("opset").as_int() < 13:
        return  # before opset 13 a Softmax ran over several axes
    name, inputs = node.op_type.removeprefix("QLinear").removeprefix("Q"), list(node.inputs)
    first = 6 if name in ("Add", "Conv", "Gemm", "MatMul", "Mul") else 3
    codes, rest = (inputs[2:], inputs[:2]) if name == "Concat" else (inputs[:first], inputs[first:])
    place = {"Conv": 2, "Gemm": 0}.get(name, len(rest))
    bias, result = rest[place : place + 1], rest[:place] or rest[1:]
    read = [ir.node("DequantizeLinear", codes[at : at + 3]) for at in range(0, len(codes), 3)]
    if name in ("Conv", "Gemm", "MatMul"):
        tensor = ir.convenience.get_const_tensor
        scale, scales = (None if one is None else tensor(one) for one in (inputs[1], inputs[4]))
        if scale is None or scales is None or scale.size != 1 or not result:
            return
        turned = name == "Gemm" and not node.attributes.get_int("transB", 0)
        read[1].attributes["axis"] = ir.AttrInt64("axis", -1 if name == "MatMul" else int(turned))
        if bias and bias[0] is not None:
            alpha = np.float32(node.attributes.get_float("alpha", 1.0))
            both = initializer(graph, f"{node.name}.bias.scale", scale.numpy().reshape(()) * scales.numpy() * alpha)
            read.append(ir.node("DequantizeLinear", [bias[0], both], attributes={"axis": 0}))
    real = ir.node(name, [one.outputs[0] for one in read], attributes=attributes)
    quantised = ir.node("QuantizeLinear", [real.outputs[0], *result])
    ir.convenience.replace_nodes_and_values(
        graph, node, [node], [*read, real, quantised], node.outputs, quantised.outputs
    )
