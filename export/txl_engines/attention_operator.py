"""Attention as one operator, where a library then reads keys and values in the ring's own buffers.

A graph writes attention as products and a softmax. TensorRT-RTX fuses these, but first copies all keys and values into
another order: two kernels more in every layer, and three times the traffic. Of a step of one position that is given as
ONNX's Attention, its kernel reads the buffers where they are. With more positions than one it copies in either form,
and then the products build into fewer kernels; so they stay (docs/measurements/rtx.md has the table).

The mask is added here, while the products replace scores that are not visible by -1e4. What is added is so low that no
score of a row that nobody may see comes through: none below 1e30 in float32 and bfloat16, and in float16 none up to
65504. Only keys that are no numbers themselves do, which the products keep out. Values that are none come through in
both forms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

from txl_runtime.bundle.tables import Program

from txl_engines.checking import Graph, decode_graph, import_onnx

MULTIPLE = 8
"""Heads of other sizes are padded in copies, so nothing is read in place."""
FEWEST, MOST = 8, 256
"""The sizes of heads that the kernel is made for."""


class Attention(NamedTuple):
    """An attention written as products: names of its values, and the nodes that compute it."""

    query: str
    key: str
    value: str
    visible: str
    bias: str
    unseen: str
    out: str
    nodes: tuple[Any, ...]


def unite_attention(graph: Graph, program: Program) -> Graph:
    """The graph with its attentions over ring memory as one operator each, if it is of one position; else as it is."""
    if program.segment_length != 1 or not graph.scatters:
        return graph
    onnx, model = import_onnx(), decode_graph(graph.data, graph.path)
    sizes = {spec.name: spec.fixed for spec in program.outputs if spec.name in graph.states}
    found = [each for each in find_attentions(model.graph) if _fits(sizes.get(each.key, ())) and each.value in sizes]
    if not found:
        return graph
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    if any(each.unseen not in types for each in found):
        return graph
    lowest = {kind: f"attend.lowest.{kind}" for kind in sorted({types[each.unseen] for each in found})}
    model.graph.initializer.extend(_lowest(kind, name) for kind, name in lowest.items())
    gone = {id(node) for each in found for node in each.nodes}
    last = {id(each.nodes[-1]): each for each in found}
    nodes = []
    for node in model.graph.node:
        if id(node) not in gone:
            nodes.append(deepcopy(node))
        elif each := last.get(id(node)):
            mask = f"attend.mask.{each.out}"
            masked = [each.visible, each.bias, lowest[types[each.unseen]]]
            hides = onnx.helper.make_node("Where", masked, [mask], name=mask)
            inputs = [each.query, each.key, each.value, mask]
            attends = onnx.helper.make_node("Attention", inputs, [each.out], name=f"attend.{each.out}", scale=1.0)
            nodes += hides, attends
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    data: bytes = model.SerializeToString(deterministic=True)
    return dataclasses.replace(graph, data=data, nodes=tuple((node.name, node.op_type) for node in model.graph.node))


def _lowest(kind: int, name: str) -> Any:
    """What hides a row, as a constant of a type of floats: low, but no factor of a kernel makes it infinite."""
    onnx = import_onnx()
    return onnx.helper.make_tensor(name, kind, [], [-65504.0 if kind == onnx.TensorProto.FLOAT16 else -1e30])


def _fits(shape: tuple[int, ...]) -> bool:
    """Whether keys [B, H, C, d_head] can be read where they are."""
    return len(shape) == 4 and shape[3] % MULTIPLE == 0 and FEWEST <= shape[3] <= MOST


def find_attentions(graph: Any) -> Iterator[Attention]:
    """Every attention of a form that this module can change.

    It is Where(visible, query @ keyᵀ + bias, unseen) → softmax → @ value, with or without casts around the softmax.
    """
    makers = {name: node for node in graph.node for name in node.output}
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)

    def maker(name: str, operator: str) -> Any:
        node: Any = makers.get(name)
        return node if node is not None and node.op_type == operator else None

    def reader(name: str, operator: str) -> Any:
        found = readers.get(name, [])
        return found[0] if len(found) == 1 and found[0].op_type == operator else None

    for softmax in graph.node:
        if softmax.op_type != "Softmax":
            continue
        before = maker(softmax.input[0], "Cast")
        where: Any = maker(before.input[0] if before else softmax.input[0], "Where")
        after = reader(softmax.output[0], "Cast")
        mix = reader(after.output[0] if after else softmax.output[0], "MatMul")
        total: Any = maker(where.input[1], "Add") if where else None
        product: Any = maker(total.input[0], "MatMul") if total else None
        turned = maker(product.input[1], "Transpose") if product else None
        if mix is None or turned is None:
            continue
        inner = [node for node in (turned, product, total, where, before, softmax, after) if node is not None]
        if any(len(readers.get(node.output[0], ())) != 1 for node in inner):
            continue  # somebody else reads what would be gone
        yield Attention(
            query=product.input[0],
            key=turned.input[0],
            value=mix.input[1],
            visible=where.input[0],
            bias=total.input[1],
            unseen=where.input[2],
            out=mix.output[0],
            nodes=(*inner, mix),
        )
