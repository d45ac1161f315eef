"""Reads and builds stacks, e.g. the states of all layers in one tensor, with few nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import onnx_ir as ir

from txl_export.graphs.passes.builder import Builder
from txl_export.graphs.passes.values import Block, axis_of, block_of, numbers_of, size_of, sizes_of, to_reshape

_Part: TypeAlias = "tuple[ir.Value, Block]"
"""A slice of a value, and the range of the value that it covers."""


def take_stacks_apart(graph: ir.Graph) -> None:
    """Read slices of inputs, and of values that depend on them, by one Gather each or by one Split, in place."""
    build, inputs = Builder(graph, "part"), list(graph.inputs)
    changing = set(inputs)
    for node in graph:
        if any(value in changing for value in node.inputs):
            changing.update(node.outputs)
            inputs += node.outputs
    for value in inputs:  # values that depend only on constants are left out: engines compute them once
        for result, block in _parts(value):
            _take_out(build, value, result, block)
        parts = [part for part in _parts(value) if part[0].uses()]
        for axis in {block.axis for _, block in parts}:
            _split(graph, build, value, axis, [part for part in parts if part[1].axis == axis])


def _parts(value: ir.Value) -> Iterator[_Part]:
    """Yield the slices of a value along one axis, except outputs of the graph."""
    for node, index in [(use.node, use.idx) for use in value.uses()]:
        says_axes = len(node.inputs) > 3  # a Slice without axes cuts a shape, which is small
        block = block_of(node.outputs[0]) if node.op_type == "Slice" and says_axes and not index else None
        if block is not None and not node.outputs[0].is_graph_output():
            yield node.outputs[0], block


def _take_out(build: Builder, value: ir.Value, result: ir.Value, block: Block) -> None:
    """Replace a slice of size 1 and the Squeeze after it by a Gather."""
    for reader in [use.node for use in result.uses()]:
        if reader.op_type == "Squeeze" and _axes(reader) == [block.axis]:
            build.replace(reader.outputs[0], build.at(reader).gather(value, block.start, block.axis))


def _split(graph: ir.Graph, build: Builder, value: ir.Value, axis: int, parts: Sequence[_Part]) -> None:
    """Replace slices that together cover a value exactly once by one Split."""
    parts = sorted(parts, key=lambda part: part[1].start)
    results, starts, ends = zip(*((result, block.start, block.end) for result, block in parts), strict=True)
    if len(parts) < 2 or [*starts, size_of(value, axis)] != [0, *ends]:
        return
    first = next(node for node in graph if node.outputs[0] in results)
    lengths = [block.end - block.start for _, block in parts]
    for result, piece in zip(results, build.at(first).split(value, lengths, axis), strict=True):
        build.replace(result, piece)


def put_stacks_together(graph: ir.Graph) -> None:
    """Replace an Unsqueeze on each operand of a Concat by one Reshape after the Concat, in place."""
    build = Builder(graph, "stack")
    for node in list(graph):
        before = [None if value is None else value.producer() for value in node.inputs]
        sizes = sizes_of(node.outputs[0])
        if node.op_type != "Concat" or len(before) < 2 or not sizes:
            continue
        axis = axis_of(node, node.outputs[0])
        parts = [one.inputs[0] for one in before if one and one.op_type == "Unsqueeze" and _axes(one) == [axis]]
        if len(parts) < len(before) or axis + 1 == len(sizes) or to_reshape(sizes).count(-1) > 1 or 0 in sizes:
            continue
        joined = build.at(node).op("Concat", parts, axis=axis)
        build.replace(node.outputs[0], build.reshape(joined, sizes))


def _axes(node: ir.Node) -> list[int] | None:
    """Return the axes that a Squeeze or Unsqueeze names, counted from the front; None if they are unknown."""
    value = node.outputs[0] if node.op_type == "Unsqueeze" else node.inputs[0]
    axes, rank = numbers_of(node.inputs[1] if len(node.inputs) > 1 else None), len(sizes_of(value))
    return None if axes is None or not rank else sorted(axis % rank for axis in axes)
