"""Rewrites attention as one operator, if the library then reads keys and values directly from the ring's buffers.

A graph writes attention as products and a softmax. TensorRT-RTX fuses these, but first copies all keys and values into
a different layout: two more kernels in every layer, and three times the traffic. In a step of one position, the kernel
for ONNX's Attention reads the buffers in place. With more positions the library copies in either form, unless each
position is a head of its own that shares its keys, e.g. 4 positions of 8 heads as 32 heads of one position. Then keys
and values are read once for every position, so only short segments are written so; in longer segments products give
fewer kernels, so the products stay (docs/measurements/rtx.md has the table).

This form adds the mask to the scores, while the products replace the scores of hidden keys by -1e4. The mask is low
enough to hide any score below 1e30 in float32 and bfloat16, and up to 65504 in float16. The two forms differ for one
case: a hidden key that is NaN or infinite reaches the result here, and does not with the products. A hidden value that
is NaN or infinite reaches the result in both forms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

from txl_runtime.bundle.tables import Program

from txl_engines.checking import Graph, decode_graph, import_onnx, readers_of

MULTIPLE = 8
"""Head sizes must be multiples of 8: the kernel pads keys of other sizes in copies, so it reads nothing in place."""
POSITIONS = 5
"""Longest segment whose positions may be heads: the longest that `export --lookup` makes for drafts."""
FEWEST, MOST = 8, 256
"""Smallest and largest head size that the kernel supports."""


class Attention(NamedTuple):
    """Names of the values of an attention that is written as products, and the nodes that compute it."""

    query: str
    key: str
    value: str
    visible: str
    bias: str
    unseen: str
    out: str
    nodes: tuple[Any, ...]


def unite_attention(graph: Graph, program: Program, positions: int = 1) -> Graph:
    """Replace each attention over ring memory by one operator if the program is short enough; else return `graph`.

    `positions` is the longest segment whose attentions are replaced.
    """
    if program.segment_length > positions or not graph.scatters:
        return graph
    onnx, model = import_onnx(), decode_graph(graph.data, graph.path)
    sizes = {spec.name: spec.fixed for spec in program.outputs if spec.name in graph.states}
    attentions = [
        each for each in find_attentions(model.graph) if _fits(sizes.get(each.key, ())) and each.value in sizes
    ]
    if not attentions:
        return graph
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    if any(each.unseen not in types for each in attentions):
        return graph
    lowest = {kind: f"attend.lowest.{kind}" for kind in sorted({types[each.unseen] for each in attentions})}
    model.graph.initializer.extend(_lowest(kind, name) for kind, name in lowest.items())
    gone = {id(node) for each in attentions for node in each.nodes}
    last = {id(each.nodes[-1]): each for each in attentions}
    nodes = []
    for node in model.graph.node:
        if id(node) not in gone:
            nodes.append(deepcopy(node))
        elif each := last.get(id(node)):
            mask = f"attend.mask.{each.out}"
            masked = [each.visible, each.bias, lowest[types[each.unseen]]]
            hides = onnx.helper.make_node("Where", masked, [mask], name=mask)
            nodes += hides, *_attends(model.graph, each, mask, sizes[each.key], program.segment_length)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    data: bytes = model.SerializeToString(deterministic=True)
    return dataclasses.replace(graph, data=data, nodes=tuple((node.name, node.op_type) for node in model.graph.node))


def _attends(graph: Any, each: Attention, mask: str, keys: tuple[int, ...], positions: int) -> list[Any]:
    """Return the nodes of one attention; each of several positions becomes a head of its own that shares its keys.

    `keys` is the shape [B, H, C, d_head] of the keys, e.g. [1, 8, 648, 64]; 4 positions make queries [1, 32, 1, 64].
    """
    onnx, name = import_onnx(), f"attend.{each.out}"
    (batch, heads, slots, width), node = keys, onnx.helper.make_node
    if positions == 1:
        return [node("Attention", [each.query, each.key, each.value, mask], [each.out], name, scale=1.0)]

    def reshape(value: str, out: str, *shape: int) -> Any:
        graph.initializer.append(onnx.helper.make_tensor(f"{out}.shape", onnx.TensorProto.INT64, [4], shape))
        return node("Reshape", [value, f"{out}.shape"], [out], out)

    query, hidden, mixed = (f"{name}.{end}" for end in ("query", "mask", "mixed"))
    return [
        reshape(each.query, query, batch, heads * positions, 1, width),
        reshape(mask, hidden, batch, heads * positions, 1, slots),
        node("Attention", [query, each.key, each.value, hidden], [mixed], name, scale=1.0),
        reshape(mixed, each.out, batch, heads, positions, width),
    ]


def _lowest(kind: int, name: str) -> Any:
    """Return the constant that hides a row: low, but not so low that a kernel's factor makes it infinite."""
    onnx = import_onnx()
    return onnx.helper.make_tensor(name, kind, [], [-65504.0 if kind == onnx.TensorProto.FLOAT16 else -1e30])


def _fits(shape: tuple[int, ...]) -> bool:
    """Return whether keys [B, H, C, d_head] can be read in place, e.g. with d_head 64 but not 60."""
    return len(shape) == 4 and shape[3] % MULTIPLE == 0 and FEWEST <= shape[3] <= MOST


def find_attentions(graph: Any) -> Iterator[Attention]:
    """Yield every attention of the form Where(visible, query @ keyᵀ + bias, unseen) → softmax → @ value.

    There may be casts around the softmax.
    """
    makers = {name: node for node in graph.node for name in node.output}
    readers = readers_of(graph)

    def maker(name: str, operator: str) -> Any:
        node: Any = makers.get(name)
        return node if node is not None and node.op_type == operator else None

    def reader(name: str, operator: str) -> Any:
        nodes = [node for node, _ in readers.get(name, [])]
        return nodes[0] if len(nodes) == 1 and nodes[0].op_type == operator else None

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
            continue  # a node outside reads a value that would be removed
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
