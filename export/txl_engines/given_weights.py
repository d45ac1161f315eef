"""Weights as inputs of a graph, so that all engines of a bundle can read them in one place on the device.

A library copies the weights of a graph into each engine. What is an input instead is not in the engine: the runtime
lays it out once and gives its address to every engine. Which weights, and how they lie, follows from what the compiler
of TensorRT-RTX does with them (docs/measurements/rtx.md has the counts):

* A matrix that a product reads is given the other way round, as [out, in], with a Transpose in the graph. So the
  compiler itself lays it out for a step of one position. As [in, out] it copies all of it in each step.
* A table whose rows are gathered, and the matrix of a Gemm that is [out, in] already, are given as they are. One that
  is both becomes two inputs, which have one address; as one input it is copied.
* Vectors and small matrices stay in the engine, since each of them as an input adds a kernel.
"""

from __future__ import annotations

import dataclasses
from copy import deepcopy
from typing import Any, Literal

import msgspec
from txl_runtime.device.engines.sidecar import GivenWeight

from txl_engines.checking import Graph, binding_of, decode_graph, import_onnx, place_of

LEAST_BYTES = 1 << 16
"""Of a weight that is given."""
Use = Literal["gathered", "linear", "turned"]
"""What reads a weight where it lies: rows are gathered; [out, in] of a Gemm; [out, in] of a product, by a Transpose."""


def give_weights(graph: Graph, file: str) -> Graph:
    """The graph with its large weights out of a file as inputs that stand behind its own; its `sha256` stays."""
    onnx, model = import_onnx(), decode_graph(graph.data, graph.path)
    readers: dict[str, list[tuple[Any, int]]] = {}
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            readers.setdefault(name, []).append((node, index))
    given, kept, turns, held = list[GivenWeight](), list[Any](), list[Any](), graph.weight_bytes
    for tensor in model.graph.initializer:
        location, offset, size = place_of(tensor, graph.path) or ("", 0, 0)
        real = tensor.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
        uses = [(_use(node, index), node, index) for node, index in readers.get(tensor.name, [])]
        if not real or location != file or size < LEAST_BYTES or any(use is None for use, *_ in uses):
            kept.append(deepcopy(tensor))
            continue
        held -= size
        for use in dict.fromkeys(use for use, *_ in uses):
            name, shape = f"{tensor.name}.{use}", tuple(tensor.dims)
            result, turned = name, use == "turned"
            if turned:
                result, shape = f"{name}.back", (*shape[:-2], shape[-1], shape[-2])
                axes = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
                turns.append(onnx.helper.make_node("Transpose", [name], [result], name, perm=axes))
            for other, node, index in uses:
                if other == use:
                    node.input[index] = result
            value = onnx.helper.make_tensor_value_info(name, tensor.data_type, shape)
            model.graph.input.append(value)
            given.append(
                msgspec.convert(binding_of(value)._asdict() | {"offset": offset, "turned": turned}, GivenWeight)
            )
    nodes = [*turns, *map(deepcopy, model.graph.node)]
    for field, values in ((model.graph.initializer, kept), (model.graph.node, nodes)):
        del field[:]
        field.extend(values)
    data = model.SerializeToString(deterministic=True)
    names = tuple((node.name, node.op_type) for node in nodes)
    return dataclasses.replace(graph, data=data, nodes=names, given=tuple(given), weight_bytes=held)


def _use(node: Any, place: int) -> Use | None:
    """How a node reads an input that is a weight; None where it would be copied."""
    flags = {attribute.name: attribute.i for attribute in node.attribute}
    if node.op_type == "MatMul" and place == 1:
        return "turned"
    if node.op_type == "Gemm" and place == 1 and flags.get("transB"):
        return "linear"
    return "gathered" if node.op_type == "Gather" and place == 0 and not flags.get("axis") else None
