"""Slices of joins read what was joined, joins of joins join once, and slices that follow each other are one again.

Slices, joins, selections and writes only move numbers. So a value is seen as a row of pieces of other values along one
axis, and a step that writes a cache by slices and reads it by slices costs what it would if it had been joined once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import onnx_ir as ir

from txl_export.graphs.passes.builder import Builder
from txl_export.graphs.passes.values import alike, axis_of, block_of, constant, numbers_of, size_along, sizes_of

_MOST = 64
"""A join of joins reads at most so many values, so that a loop that moves a cache T times reads no T²."""


class Piece(NamedTuple):
    """The positions `start` … `end` - 1 of a value along an axis."""

    value: ir.Value
    start: int
    end: int


def join_once(graph: ir.Graph) -> None:
    """Let each slice, selection and join of a graph read the values that its numbers come from, in place."""
    made = Pieces(graph, "join")
    for node in list(graph):
        made.at(node)
        if node.op_type == "Gather":
            _select(made, node)
        if node.op_type == "Squeeze":
            _drop(made, node)
        for result in node.outputs if node.op_type in ("Concat", "Slice", "Split") else ():
            for axis in range(len(sizes_of(result))):
                _read(made, node, result, axis)


def _read(made: Pieces, node: ir.Node, result: ir.Value, axis: int) -> None:
    """Let a join read all that was joined, and a slice the one value inside which it lies."""
    pieces = pieces_of(result, axis)
    if not pieces or pieces[0].value is result or (node.op_type != "Concat" and len(pieces) > 1):
        return
    given = [(value, 0, size_along(value, axis)) for value in node.inputs]
    if node.op_type != "Concat" and pieces[0].value is node.inputs[0] and pieces != given[:1]:
        made.slices.setdefault((pieces[0], axis), result)
    elif pieces != given or len(pieces) == 1:
        made.replace(result, made.joined(pieces, axis))


def _select(made: Pieces, node: ir.Node) -> None:
    """Let one position, whose axis is dropped, be selected from the value that it comes from."""
    source, index = node.inputs[0], constant(node.inputs[1])
    axis = axis_of(node, source)
    size = size_along(source, axis)
    if size is None or index is None or index.ndim:
        return
    (piece,) = cut(pieces_of(source, axis), int(index) % size, int(index) % size + 1)
    added = piece.value.producer()
    inner = added.inputs[0] if added is not None and added.op_type in ("Unsqueeze", "Reshape") else None
    if inner is not None and alike(inner, node.outputs[0]):  # so the axis has one position
        made.replace(node.outputs[0], inner)
    elif piece.value is not source:
        made.replace(node.outputs[0], made.gather(piece.value, piece.start, axis))


def _drop(made: Pieces, node: ir.Node) -> None:
    """Let an axis that was added and is dropped again not be added."""
    added = None if node.inputs[0] is None else node.inputs[0].producer()
    if added is not None and added.op_type == "Unsqueeze" and added.inputs[0] is not None:
        axes = [numbers_of(one.inputs[1]) if len(one.inputs) > 1 else None for one in (added, node)]
        if axes[0] is not None and axes[0] == axes[1] and alike(added.inputs[0], node.outputs[0]):
            made.replace(node.outputs[0], added.inputs[0])


def pieces_of(value: ir.Value | None, axis: int) -> list[Piece]:
    """What a value consists of along an axis, as far down as operators only move numbers; [] where it is unknown."""
    size = size_along(value, axis)
    if value is None or size is None:
        return []
    node, block = value.producer(), block_of(value)
    if node is not None and node.op_type == "Concat" and axis_of(node, value) == axis:
        rows = [pieces_of(part, axis) for part in node.inputs]
        if all(rows) and sum(map(len, rows)) <= max(_MOST, len(rows)):
            return _merged(piece for row in rows for piece in row)
    if node is None or block is None or block.axis != axis:
        return [Piece(value, 0, size)]
    return cut(pieces_of(node.inputs[0], axis), block.start, block.end)


def cut(pieces: Iterable[Piece], start: int, end: int) -> list[Piece]:
    """The positions `start` … `end` - 1 of a row of pieces."""
    found, at = list[Piece](), 0
    for value, first, last in pieces:
        low, high = max(start, at), min(end, at + last - first)
        if low < high:
            found.append(Piece(value, first + low - at, first + high - at))
        at += last - first
    return found


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    """The same with pieces that follow each other in one value made one."""
    found = list[Piece]()
    for piece in pieces:
        if found and found[-1].value is piece.value and found[-1].end == piece.start:
            piece = Piece(piece.value, found.pop().start, piece.end)
        found.append(piece)
    return found


class Pieces(Builder):
    """Puts rows of pieces together in a graph whose nodes are visited in order; equal slices are one node.

    Attributes:
        slices: the values that pieces are, by the axis along which they are pieces.
    """

    def __init__(self, graph: ir.Graph, name: str) -> None:
        super().__init__(graph, name)
        self.slices: dict[tuple[Piece, int], ir.Value] = {}

    def joined(self, pieces: Iterable[Piece], axis: int) -> ir.Value:
        """The value that consists of the pieces."""
        parts = list[ir.Value]()
        for piece in _merged(pieces):
            value, start, end = piece
            if (start, end) != (0, size_along(value, axis)):
                if (piece, axis) not in self.slices:
                    self.slices[piece, axis] = self.slice(value, axis, start, end)
                value = self.slices[piece, axis]
            parts.append(value)
        return self.concat(parts, axis)
