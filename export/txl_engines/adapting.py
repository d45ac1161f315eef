"""Rewrites correct graphs into forms that the engines' compilers take.

For every target Max and Min replace Clip on integers: ONNX Runtime has no CUDA kernel of Clip for int32, and TensorRT
documents none. Graphs of older exports contain such Clips. TensorRT and TensorRT-RTX need two more rewrites: Elu
becomes simpler operators, and a weight that starts where a longer one starts moves into the graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from txl_engines.checking import Graph, decode_graph, import_onnx, place_of

_WHOLE = frozenset({"INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"})


def adapt(graph: Graph) -> Graph:
    """Rewrite a checked graph for the libraries' parsers; `sha256` stays the hash of the bytes before the rewrite."""
    graph = without_elu(without_clip(graph))
    model = decode_graph(graph.data, graph.path)
    changed = _separate(model, graph.path)
    return dataclasses.replace(graph, data=model.SerializeToString()) if changed else graph


def without_clip(graph: Graph) -> Graph:
    """Replace each Clip on integers by Max and Min; the graph's `sha256` stays as it is."""
    return _replaced(graph, "Clip", lambda model, node, kind: _bounds(node) if kind in _WHOLE else None)


def without_elu(graph: Graph) -> Graph:
    """Replace each Elu by Max, Min and Exp; the graph's `sha256` stays as it is.

    TensorRT-RTX 1.7 parses Elu, but its compiler fails on some graphs with two of them, e.g. a policy of rl_games: "elu
    … There are 2 inputs. Expected 1".
    """
    return _replaced(graph, "Elu", _elu)


def _replaced(graph: Graph, operator: str, make: Callable[[Any, Any, str], list[Any] | None]) -> Graph:
    """Replace each node of an operator by the nodes of `make(model, node, element type)`; None keeps the node."""
    if all(operator != other for _, other in graph.nodes):
        return graph
    model = decode_graph(graph.data, graph.path)
    kinds, nodes_after = value_types(graph.data), list[Any]()
    for node in model.graph.node:
        nodes = make(model, node, kinds.get(node.input[0], "")) if node.op_type == operator else None
        nodes_after += [deepcopy(node)] if nodes is None else nodes
    del model.graph.node[:]
    model.graph.node.extend(nodes_after)
    names = tuple((node.name, node.op_type) for node in model.graph.node)
    return dataclasses.replace(graph, data=model.SerializeToString(deterministic=True), nodes=names)


def _elu(model: Any, node: Any, kind: str) -> list[Any] | None:
    """Return nodes that compute max(x, 0) + alpha (exp(min(x, 0)) - 1); None if the element type is unknown."""
    if not kind or kind == "UNDEFINED":
        return None
    onnx = import_onnx()
    alpha = next((attribute.f for attribute in node.attribute if attribute.name == "alpha"), 1.0)
    value, result = node.input[0], node.output[0]
    numbers = {"zero": 0.0, "one": 1.0, "alpha": alpha}
    for name, number in numbers.items():
        typed = onnx.helper.make_tensor(f"{result}.{name}", onnx.TensorProto.DataType.Value(kind), [], [number])
        model.graph.initializer.append(typed)
    steps = (
        ("Min", value, "zero", "low"),
        ("Exp", "low", None, "exp"),
        ("Sub", "exp", "one", "less"),
        ("Mul", "less", "alpha", "left"),
        ("Max", value, "zero", "right"),
        ("Add", "right", "left", None),
    )

    def named(name: str | None) -> str:
        return result if name is None else name if name == value else f"{result}.{name}"

    return [
        onnx.helper.make_node(
            operator, [named(one), *([] if other is None else [named(other)])], [named(out)], f"{node.name}.{operator}"
        )
        for operator, one, other, out in steps
    ]


def value_types(data: bytes) -> dict[str, str]:
    """Return ONNX's name of the element type of every value in a graph, e.g. "INT32"."""
    onnx = import_onnx()
    graph = onnx.shape_inference.infer_shapes(data).graph
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input, *graph.output)}
    kinds |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    return {name: onnx.TensorProto.DataType.Name(kind) for name, kind in kinds.items()}


def _bounds(clip: Any) -> list[Any]:
    """Return the nodes that replace a Clip: Max for a lower bound, Min for an upper one, Identity for neither."""
    onnx = import_onnx()
    ends = [(kind, [end]) for kind, end in zip(("Max", "Min"), clip.input[1:], strict=False) if end]
    ends = ends or [("Identity", [])]
    between = [f"{clip.output[0]}.{kind}" for kind, _ in ends[:-1]]
    return [
        onnx.helper.make_node(kind, [value, *end], [result], f"{clip.name}.{kind}")
        for (kind, end), value, result in zip(ends, [clip.input[0], *between], [*between, clip.output[0]], strict=True)
    ]


def _separate(model: Any, path: Path) -> bool:
    """Copy each weight that starts where a longer weight starts into the graph; return whether there was such a weight.

    Graphs share one weight file, but the parsers identify weights by their offset, and refuse two weights with the same
    offset and different lengths ("Weights of same values but of different counts").
    """
    onnx = import_onnx()
    places: dict[tuple[str, int], list[tuple[int, Any]]] = {}
    for tensor in model.graph.initializer:
        if place := place_of(tensor, path):
            name, offset, length = place
            places.setdefault((name, offset), []).append((length, tensor))
    changed = False
    for (name, offset), weights in places.items():
        longest = max(length for length, _ in weights)
        for length, tensor in weights:
            if length != longest:
                with (path.parent / name).open("rb") as stream:
                    stream.seek(offset)
                    tensor.raw_data = stream.read(length)
                del tensor.external_data[:]
                tensor.data_location = onnx.TensorProto.DEFAULT
                changed = True
    return changed
