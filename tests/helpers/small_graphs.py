"""Small ONNX graphs with the programs that describe them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import TensorProto, helper
from txl_runtime.bundle.tables import Program, TensorSpec

FLOAT, HALF, BF16, INT32 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT32
NAMES = {FLOAT: "float32", HALF: "float16", BF16: "bfloat16", INT32: "int32", TensorProto.BOOL: "bool"}


def value(name: str, shape: Sequence[Any], dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Sequence[onnx.TensorProto] = (),
    opset: int = 18,
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "small", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def program(graph: onnx.ModelProto, update: str = "rolled", name: str = "small") -> Program:
    """A program that promises what the graph has; other types count as float, as the parser takes double."""

    def specs(values: Sequence[onnx.ValueInfoProto]) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(
                name=item.name,
                dtype=NAMES.get(item.type.tensor_type.elem_type, "float32"),
                shape=tuple(dim.dim_value or 1 for dim in item.type.tensor_type.shape.dim),
            )
            for item in values
        )

    inputs, outputs = specs(graph.graph.input), specs(graph.graph.output)
    file = f"{name}.onnx"
    return Program(
        name=name, kind="logprobs", segment_length=1, update=update, file=file, inputs=inputs, outputs=outputs
    )


def product(left: int = FLOAT, right: int = FLOAT, inner: tuple[int, int] = (4, 4)) -> onnx.ModelProto:
    node = helper.make_node("MatMul", ["a", "b"], ["c"], name="the_product")
    return model(
        [node], [value("a", [2, inner[0]], left), value("b", [inner[1], 2], right)], [value("c", [2, 2], left)]
    )


def ring(dtype: int = HALF, length: int = 4) -> onnx.ModelProto:
    """Attention over a ring of 24 slots, keys and values updated in place."""
    heads = [1, 2, length, 64]
    nodes = [
        helper.make_node("Cast", ["head"], ["head.64"], to=TensorProto.INT64),
        helper.make_node("TensorScatter", ["memory.key", "k", "head.64"], ["new_memory.key"], axis=2, mode="linear"),
        helper.make_node(
            "TensorScatter", ["memory.value", "v", "head.64"], ["new_memory.value"], axis=2, mode="linear"
        ),
        helper.make_node("Transpose", ["new_memory.key"], ["keys"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "keys"], ["content"], name="content"),
        helper.make_node("Add", ["content", "position"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=-1, name="softmax"),
        helper.make_node("MatMul", ["weights", "new_memory.value"], ["out"]),
    ]
    slots = [1, 2, 24, 64]
    inputs = [value(name, heads, dtype) for name in ("q", "k", "v")]
    inputs += [value("head", [1], INT32), value("position", [1, 2, length, 24], dtype)]
    inputs += [value("memory.key", slots, dtype), value("memory.value", slots, dtype)]
    outputs = [
        value("out", heads, dtype),
        value("new_memory.key", slots, dtype),
        value("new_memory.value", slots, dtype),
    ]
    return model(nodes, inputs, outputs, opset=24)
