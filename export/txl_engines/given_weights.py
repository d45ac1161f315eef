"""Turns weights into inputs of a graph, so that all engines of a bundle read one copy on the device.

A library copies a graph's weights into each engine. An input lies outside the engines: the runtime stores it once and
passes its address to every engine. Which weights become inputs, and in which layout, depends on TensorRT-RTX's compiler
(docs/measurements/rtx.md has the counts):

* A matrix that a product reads is passed transposed, as [out, in], with a Transpose in the graph. The compiler itself
  has this layout for a step of one position. A matrix passed as [in, out] would be copied whole in each step.
* A table whose rows are gathered, and the matrix of a Gemm that is [out, in] already, are passed unchanged. A weight
  that is used in both ways becomes two inputs with one address; a single input would be copied.
* Vectors and small matrices stay in the engine, since each of them as an input adds a kernel.
* A matrix of an odd size that a product reads stays in the engine: the compiler makes the size even, only once for a
  weight in the engine, but in each step for an input. A weight that the graph transposes, slices or joins before a
  product reads it stays in the engine as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Literal, get_args

import msgspec
from txl_runtime.bundle.engines.sidecar import GivenWeight

from txl_engines.checking import Graph, binding_of, decode_graph, import_onnx, place_of, readers_of

LEAST_BYTES = 1 << 16
"""Least size in bytes of a weight that becomes an input; each smaller weight would cost a kernel."""
Use = Literal["gathered", "linear", "turned"]
"""Ways to read a weight: "gathered": by rows. "linear": as [out, in], by a Gemm. "turned": by a product, after a
Transpose.
"""
BACK = ".back"
ENDS = (*get_args(Use), f"turned{BACK}")
"""Suffixes of the names of new values that replace a weight."""


def give_weights(graph: Graph, file: str) -> Graph:
    """Turn the graph's large weights in one file into inputs, after those that it has; its `sha256` stays as it is."""
    onnx, model = import_onnx(), decode_graph(graph.data, graph.path)
    readers = readers_of(model.graph)
    returned = {value.name for value in model.graph.output}
    names_in_use = readers.keys() | {name for node in model.graph.node for name in node.output}
    weights, initializers, turns, gone = list[GivenWeight](), list[Any](), list[Any](), 0
    for tensor in model.graph.initializer:
        location, offset, size = place_of(tensor, graph.path) or ("", 0, 0)
        real = tensor.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
        uses = [(_use(node, index), node, index) for node, index in readers.get(tensor.name, [])]
        kinds = [use for use, *_ in uses]
        free = tensor.name not in returned and names_in_use.isdisjoint(f"{tensor.name}.{end}" for end in ENDS)
        if not (real and free and location == file and size >= LEAST_BYTES and _read_in_place(tensor.dims, kinds)):
            initializers.append(deepcopy(tensor))
            continue
        gone += size
        for use in dict.fromkeys(kinds):
            name, shape = f"{tensor.name}.{use}", tuple(tensor.dims)
            result, turned = name, use == "turned"
            if turned:
                result, shape = f"{name}{BACK}", (*shape[:-2], shape[-1], shape[-2])
                axes = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
                turns.append(onnx.helper.make_node("Transpose", [name], [result], name, perm=axes))
            for other, node, index in uses:
                if other == use:
                    node.input[index] = result
            value = onnx.helper.make_tensor_value_info(name, tensor.data_type, shape)
            model.graph.input.append(value)
            weights.append(
                msgspec.convert(binding_of(value)._asdict() | {"offset": offset, "turned": turned}, GivenWeight)
            )
    nodes = [*turns, *map(deepcopy, model.graph.node)]
    for field, values in ((model.graph.initializer, initializers), (model.graph.node, nodes)):
        del field[:]
        field.extend(values)
    data = model.SerializeToString(deterministic=True)
    names = tuple((node.name, node.op_type) for node in nodes)
    held = graph.weight_bytes - gone
    return dataclasses.replace(graph, data=data, nodes=names, given=(*graph.given, *weights), weight_bytes=held)


def _use(node: Any, place: int) -> Use | None:
    """Return how a node reads a weight; None if the compiler would copy the weight as an input."""
    flags = {attribute.name: attribute.i for attribute in node.attribute}
    if node.op_type == "MatMul" and place == 1:
        return "turned"
    if node.op_type == "Gemm" and place == 1 and flags.get("transB"):
        return "linear"
    return "gathered" if node.op_type == "Gather" and place == 0 and not flags.get("axis") else None


def _read_in_place(shape: Sequence[int], uses: Sequence[Use | None]) -> bool:
    """Return whether the compiler reads a weight in place that is an input with these uses."""
    odd = is_odd(shape) and set(uses) != {"gathered"}
    return bool(uses) and None not in uses and len(shape) > 1 and not odd


def is_odd(shape: Sequence[int]) -> bool:
    """Return whether a product's matrix has an odd size, so that the compiler would copy it as an input."""
    return any(size % 2 for size in shape[-2:])
