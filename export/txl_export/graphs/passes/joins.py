"""Slices of joins read what was joined, joins of joins join once, and slices that follow each other are one again.

So a step that writes a cache by slices and reads it by slices costs what it would if it had been written with one join.
"""

from __future__ import annotations

import onnx_ir as ir

from txl_export.graphs.passes.pieces import Pieces, added_axes, axis_of, cut, pieces_of, selected, size_along


def join_once(graph: ir.Graph) -> None:
    """Let each slice, selection and join of a graph read the values that its numbers come from, in place."""
    made = Pieces(graph)
    for node in list(graph):
        source = node.inputs[0] if node.inputs else None
        if source is None:
            continue
        if node.op_type == "Gather":
            _select(made, node, source)
        elif node.op_type == "Concat":
            axis = axis_of(node, node.outputs[0])
            pieces = None if axis is None else pieces_of(node.outputs[0], axis)
            if axis is not None and pieces is not None:
                parts = [(piece.value, piece.start, piece.end) for piece in pieces]
                if parts != [(value, 0, size_along(value, axis)) for value in node.inputs] or len(parts) == 1:
                    made.replace(node.outputs[0], made.joined(node, pieces, axis))
        elif node.op_type in ("Slice", "Split"):
            for result in node.outputs:
                _take(made, node, source, result)


def _take(made: Pieces, node: ir.Node, source: ir.Value, result: ir.Value) -> None:
    """Let a slice of a join be a slice of what was joined, where it lies inside one value, or that value."""
    for axis in range(len(source.shape) if source.shape is not None else 0):
        pieces = pieces_of(result, axis)
        if pieces is None or len(pieces) != 1 or pieces[0].value is result:
            continue
        (piece,) = pieces
        if piece.value is source and (piece.start, piece.end) != (0, size_along(source, axis)):
            made.know(result, piece, axis)
        else:
            made.replace(result, made.joined(node, pieces, axis))
        return


def _select(made: Pieces, node: ir.Node, source: ir.Value) -> None:
    """Let one position, whose axis is dropped, be selected from the value that it comes from."""
    axis = axis_of(node, source)
    index = None if axis is None else selected(node, source, axis)
    inside = None if axis is None else pieces_of(source, axis)
    if axis is None or index is None or inside is None:
        return
    (piece,) = cut(inside, index, index + 1)
    added = piece.value.producer()
    if added is not None and added.inputs[0] is not None and added_axes(added) == [axis]:
        made.replace(node.outputs[0], added.inputs[0])
        return
    if piece.value is not source:
        inputs = [piece.value, made.numbers(piece.start, index=True)]
        made.replace(node.outputs[0], made.add(node, "Gather", inputs, node.outputs[0].shape, axis=axis))
