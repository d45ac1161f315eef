"""Converts a float32 graph to half precision: stores weights in fp16 or bf16, and multiplies by them in fp16 or bf16.

A Cast before each such product converts its second operand, and a Cast after it the result. Norms, softmaxes,
positions, sums over time, inputs, outputs and states stay float32. All types are explicit, so engines cannot choose
different ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Literal

import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass

from txl_export.graphs.settling import infer_shapes

HalfPrecision = Literal["fp16", "bf16"]
HALF: dict[HalfPrecision, tuple[ir.DataType, torch.dtype]] = {
    "fp16": (ir.DataType.FLOAT16, torch.float16),
    "bf16": (ir.DataType.BFLOAT16, torch.bfloat16),
}
RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
PRODUCTS: dict[HalfPrecision, frozenset[str]] = {
    "fp16": frozenset({"MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose"}) | RECURRENT,
    "bf16": frozenset({"MatMul", "Gemm"}),  # in opset 18 no other product takes bf16
}
"""Operators that multiply by weights, for each precision."""
LAYOUT = frozenset({"Concat", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators that may change a weight's layout before a product multiplies by it."""


def weights_of_products(graph: ir.Graph, precision: HalfPrecision, parameters: Collection[str]) -> set[str]:
    """Return the names of the float32 constants by which the graph's products can multiply in half precision.

    Args:
        graph: the graph.
        precision: the half precision.
        parameters: names of constants that are the model's parameters. A product with any other constant, e.g. the
            frequencies of positions, stays float32. LSTM, GRU and RNN multiply by weights only.
    """
    weights: set[str] = set()
    for node in graph:
        if node.op_type not in PRODUCTS[precision] or not _is_float(node.outputs):
            continue
        for operand in _weights(node):
            names = _origins(operand)
            if names and (node.op_type in RECURRENT or names <= set(parameters)):
                weights |= names
    return weights


def to_half(model: ir.Model, precision: HalfPrecision, weights: Collection[str]) -> None:
    """Convert a float32 graph to half precision, in place.

    Args:
        model: the graph; its values have types.
        precision: the precision of weights and of products with them.
        weights: names of constants to convert, from `weights_of_products` of all the bundle's graphs.
    """
    graph = model.graph
    halving = _Halving(graph, HALF[precision][0], frozenset(weights))
    for node in list(graph):
        if node.op_type in PRODUCTS[precision] and _is_float(node.outputs):
            operands = _weights(node)
            known = (_origins(operand) for operand in operands)
            if any(names and names <= halving.weights for names in known) or node.op_type in RECURRENT:
                halving.convert(node)
    halving.finish()
    RemoveUnusedNodesPass()(model)
    infer_shapes(model)


def computes_in_half(graph: ir.Graph) -> bool:
    """Return whether a graph computes in float16 with most values of its floating-point constants.

    A float16 constant that only a Cast reads counts as float32.
    """
    constants = [node.outputs[0] for node in graph if node.op_type == "Constant"]
    sizes = {True: 0, False: 0}
    for value in (*graph.initializers.values(), *constants):
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is not None and tensor.dtype.is_floating_point():
            read = any(node.op_type != "Cast" for node, _ in value.uses())
            sizes[tensor.dtype == ir.DataType.FLOAT16 and read] += tensor.size
    return sizes[True] > sizes[False]


class _Halving:
    """Converts one graph; each value is converted to half precision only once."""

    def __init__(self, graph: ir.Graph, kind: ir.DataType, weights: frozenset[str]) -> None:
        self.weights = weights
        self._graph = graph
        self._kind = kind
        self._halves: dict[ir.Value, ir.Value] = {}
        for name in sorted(weights & graph.initializers.keys()):
            self._halves[graph.initializers[name]] = self._stored(graph.initializers[name])

    def convert(self, node: ir.Node) -> None:
        """Make a product take and return half precision: add Casts before and after it."""
        for index, operand in enumerate(node.inputs):
            if operand is not None and operand.dtype == ir.DataType.FLOAT:
                node.replace_input_with(index, self._half(operand, node))
        after = node
        for output in list(node.outputs):
            if output.dtype != ir.DataType.FLOAT or not (output.uses() or output.is_graph_output()):
                continue
            name = output.name
            cast = ir.node("Cast", [output], attributes={"to": ir.DataType.FLOAT})
            result = cast.outputs[0]
            result.type, result.shape = ir.TensorType(ir.DataType.FLOAT), output.shape
            ir.convenience.replace_all_uses_with(output, result, replace_graph_outputs=True)
            cast.replace_input_with(0, output)
            result.name, output.name = name, f"{name}.half"
            output.type = ir.TensorType(self._kind)
            self._graph.insert_after(after, cast)
            after = cast
        for output in node.outputs:
            if output.dtype == ir.DataType.FLOAT:
                output.type = ir.TensorType(self._kind)

    def finish(self) -> None:
        """Point every remaining reader of a converted weight to its half precision copy; drop the float32 weight."""
        for name in sorted(self.weights & self._graph.initializers.keys()):
            value = self._graph.initializers[name]
            half = self._halves[value]
            whole: ir.Value | None = None
            for node, index in list(value.uses()):
                if node.op_type == "Gather" and index == 0:
                    node.replace_input_with(0, half)
                    self.convert(node)
                    continue
                if whole is None:
                    cast = ir.node("Cast", [half], attributes={"to": ir.DataType.FLOAT})
                    whole = cast.outputs[0]
                    whole.name, whole.type, whole.shape = f"{name}.whole", value.type, value.shape
                    self._graph.insert_before(self._graph[0], cast)
                node.replace_input_with(index, whole)
            del self._graph.initializers[name]
            value.name = f"{name}.float"
            half.name = name
            self._graph.register_initializer(half)

    def _half(self, value: ir.Value, before: ir.Node) -> ir.Value:
        if value not in self._halves:
            names, source = _origins(value), value.producer()
            if source is not None and names and names <= self.weights:
                inputs = [
                    self._half(one, before) if one is not None and one.dtype == ir.DataType.FLOAT else one
                    for one in source.inputs
                ]
                attributes = list(source.attributes.values())
                node = ir.Node("", source.op_type, inputs, attributes, num_outputs=1)
            else:
                node = ir.node("Cast", [value], attributes={"to": self._kind})
            result = node.outputs[0]
            result.name, result.type, result.shape = f"{value.name}.cast", ir.TensorType(self._kind), value.shape
            self._graph.insert_before(before, node)
            self._halves[value] = result
        return self._halves[value]

    def _stored(self, value: ir.Value) -> ir.Value:
        assert value.const_value is not None
        tensor = ir.tensor(value.const_value.numpy().astype(self._kind.numpy()), dtype=self._kind, name=value.name)
        return ir.Value(
            name=f"{value.name}.half", type=ir.TensorType(self._kind), shape=value.shape, const_value=tensor
        )


def _weights(node: ir.Node) -> Sequence[ir.Value]:
    """Return the operands of a product that may be weights."""
    inputs = list(node.inputs)
    if node.op_type in RECURRENT:
        inputs = inputs[1:3]
    elif node.op_type != "Einsum":
        inputs = inputs[:2]
    return [operand for operand in inputs if operand is not None and operand.dtype == ir.DataType.FLOAT]


def _origins(value: ir.Value) -> set[str]:
    """Return the names of the float32 constants of which a value is only a moved copy; set() for any other value."""
    names: set[str] = set()
    for origin in _sources(value):
        if origin is None or origin.name is None or origin.const_value is None or origin.is_graph_input():
            return set()
        names.add(origin.name)
    return names


def _sources(value: ir.Value) -> Iterator[ir.Value | None]:
    node = value.producer()
    if node is None:
        yield value
    elif node.op_type not in LAYOUT:
        yield None
    else:
        data = node.inputs if node.op_type == "Concat" else node.inputs[:1]
        for one in data:
            if one is not None:
                yield from _sources(one)


def _is_float(values: Sequence[ir.Value]) -> bool:
    return any(value.dtype == ir.DataType.FLOAT for value in values)
