"""Parts of a stack, such as the states of layers, taken out of it and put together in few nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import onnx_ir as ir

from txl_export.graphs.passes.sizes import give_way, number, numbers, numbers_of, size_of, sizes_of


class _Part(NamedTuple):
    node: ir.Node
    axis: int
    start: int
    end: int


def take_stacks_apart(graph: ir.Graph) -> None:
    """Read parts of what a step is given by one Gather each, or by one Split all of them, in place."""
    given = list(graph.inputs)
    changing = set(given)
    for node in graph:
        if any(value in changing for value in node.inputs):
            changing.update(node.outputs)
            given += node.outputs
    for value in given:  # what follows from constants is computed once, however it is written
        for part in _parts(value):
            _take_out(graph, value, part)
        _split(graph, value, [part for part in _parts(value) if part.node.outputs[0].uses()])


def _parts(value: ir.Value) -> Iterator[_Part]:
    """The slices of a value along one axis, without those that are results of the graph."""
    for use in value.uses():
        node, what = use.node, [numbers_of(one) for one in use.node.inputs[1:]]
        if node.op_type != "Slice" or use.idx or len(what) < 3 or node.outputs[0].is_graph_output():
            continue
        starts, ends, axes, steps = (*what, [1])[:4]
        rank = len(sizes_of(value) or ())
        if starts and ends and axes and len(axes) == 1 and steps == [1] and rank:
            axis = axes[0] % rank
            size = size_of(value, axis)
            if isinstance(size, int):
                start, end, _ = slice(starts[0], ends[0]).indices(size)
                if start < end:
                    yield _Part(node, axis, start, end)


def _take_out(graph: ir.Graph, value: ir.Value, part: _Part) -> None:
    """Let a Gather drop the axis of a slice of one, where a Squeeze does."""
    for use in list(part.node.outputs[0].uses()):
        reader = use.node
        if reader.op_type == "Squeeze" and _axes(reader) == [part.axis]:
            node = ir.node("Gather", [value, number(graph, part.start)], attributes={"axis": part.axis})
            node.name = f"{reader.name}.part"
            graph.insert_before(reader, node)
            give_way(reader.outputs[0], node.outputs[0])


def _split(graph: ir.Graph, value: ir.Value, parts: list[_Part]) -> None:
    """Let one Split make slices that are all of a value, each value once."""
    for axis in {part.axis for part in parts}:
        ordered = sorted((part for part in parts if part.axis == axis), key=lambda part: part.start)
        places = [part.start for part in ordered] + [size_of(value, axis)]
        if len(ordered) < 2 or places[0] or [part.end for part in ordered] != places[1:]:
            continue
        sizes = numbers(graph, *(part.end - part.start for part in ordered))
        node = ir.node("Split", [value, sizes], attributes={"axis": axis}, num_outputs=len(ordered))
        first = next(one for one in graph if any(part.node is one for part in ordered))
        node.name = f"{first.name}.parts"
        graph.insert_before(first, node)
        for part, made in zip(ordered, node.outputs, strict=True):
            give_way(part.node.outputs[0], made)


def put_stacks_together(graph: ir.Graph) -> None:
    """Give an axis to all parts of a stack at once, behind the Concat, instead of to each before it, in place."""
    for node in list(graph):
        before = [None if value is None else value.producer() for value in node.inputs]
        sizes = sizes_of(node.outputs[0])
        if node.op_type != "Concat" or len(before) < 2 or sizes is None:
            continue
        axis = node.attributes.get_int("axis", 0) % len(sizes)
        parts = [one.inputs[0] for one in before if one and one.op_type == "Unsqueeze" and _axes(one) == [axis]]
        shape = [size if isinstance(size, int) else -1 for size in sizes]
        if len(parts) < len(before) or axis + 1 == len(sizes) or shape.count(-1) > 1 or 0 in shape:
            continue
        joined = ir.node("Concat", parts, attributes={"axis": axis}, name=f"{node.name}.flat")
        made = ir.node("Reshape", [joined.outputs[0], numbers(graph, *shape)], name=f"{node.name}.stack")
        joined.outputs[0].name = joined.name
        graph.insert_before(node, [joined, made])
        give_way(node.outputs[0], made.outputs[0])


def _axes(node: ir.Node) -> list[int] | None:
    """The axes that a Squeeze or an Unsqueeze names, counted from the front."""
    value = node.outputs[0] if node.op_type == "Unsqueeze" else node.inputs[0]
    axes, rank = numbers_of(node.inputs[1] if len(node.inputs) > 1 else None), len(sizes_of(value) or ())
    return None if axes is None or not rank else sorted(axis % rank for axis in axes)
