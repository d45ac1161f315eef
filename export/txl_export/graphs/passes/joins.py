"""Lets Slice, Concat, Split and Gather read the original values instead of one another's results.

These operators only move numbers. So each result is described as pieces of original values, in a row along one axis. A
step that writes and reads a cache by slices then costs the same as a step with a single Concat.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import onnx_ir as ir

from txl_export.graphs.passes.builder import Builder
from txl_export.graphs.passes.values import alike, axis_of, block_of, constant, numbers_of, size_along, sizes_of

_MOST = 64
"""Maximum number of values that one Concat reads. Without this limit, a step that shifts a cache T times would read T²
values."""


class Piece(NamedTuple):
    """A piece of a value: its positions `start` … `end` - 1 along an axis."""

    value: ir.Value
    start: int
    end: int


def join_once(graph: ir.Graph) -> None:
    """Let each Slice, Split, Concat and single-index Gather read the values that its numbers come from, in place."""
    pieces = Pieces(graph, "join")
    for node in list(graph):
        pieces.at(node)
        if node.op_type == "Gather":
            _select(pieces, node)
        if node.op_type == "Squeeze":
            _drop(pieces, node)
        for result in node.outputs if node.op_type in ("Concat", "Slice", "Split") else ():
            for axis in range(len(sizes_of(result))):
                _read(pieces, node, result, axis)


def _read(joined: Pieces, node: ir.Node, result: ir.Value, axis: int) -> None:
    """Replace a Concat by a Concat of all original pieces, and a slice by a slice of the one value that contains it."""
    pieces = pieces_of(result, axis)
    if not pieces or pieces[0].value is result or (node.op_type != "Concat" and len(pieces) > 1):
        return
    pieces_before = [(value, 0, size_along(value, axis)) for value in node.inputs]
    if node.op_type != "Concat" and pieces[0].value is node.inputs[0] and pieces != pieces_before[:1]:
        joined.slices.setdefault((pieces[0], axis), result)
    elif pieces != pieces_before or len(pieces) == 1:
        joined.replace(result, joined.joined(pieces, axis))


def _select(pieces: Pieces, node: ir.Node) -> None:
    """Let a Gather of one position read the value that the position comes from."""
    source, index = node.inputs[0], constant(node.inputs[1])
    axis = axis_of(node, source)
    size = size_along(source, axis)
    if size is None or index is None or index.ndim:
        return
    (piece,) = cut(pieces_of(source, axis), int(index) % size, int(index) % size + 1)
    added = piece.value.producer()
    inner = added.inputs[0] if added is not None and added.op_type in ("Unsqueeze", "Reshape") else None
    if inner is not None and alike(inner, node.outputs[0]):  # the axis that inner lacks has one position
        pieces.replace(node.outputs[0], inner)
    elif piece.value is not source:
        pieces.replace(node.outputs[0], pieces.gather(piece.value, piece.start, axis))


def _drop(pieces: Pieces, node: ir.Node) -> None:
    """Remove an Unsqueeze and a Squeeze that cancel each other."""
    added = None if node.inputs[0] is None else node.inputs[0].producer()
    if added is not None and added.op_type == "Unsqueeze" and added.inputs[0] is not None:
        axes = [numbers_of(one.inputs[1]) if len(one.inputs) > 1 else None for one in (added, node)]
        if axes[0] is not None and axes[0] == axes[1] and alike(added.inputs[0], node.outputs[0]):
            pieces.replace(node.outputs[0], added.inputs[0])


def pieces_of(value: ir.Value | None, axis: int) -> list[Piece]:
    """Return the pieces of original values that a value consists of along an axis: Concat, Slice and Split are undone.

    E.g. Concat(a, b)[-2 - len(b):] consists of the last two rows of `a` and all of `b`. Return [] if the size along
    the axis is unknown or open.
    """
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
    """Return the pieces that make up the positions `start` … `end` - 1 of all given pieces in a row."""
    result, at = list[Piece](), 0
    for value, first, last in pieces:
        low, high = max(start, at), min(end, at + last - first)
        if low < high:
            result.append(Piece(value, first + low - at, first + high - at))
        at += last - first
    return result


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Merge neighbouring pieces that are also neighbours in the value from which they come."""
    result = list[Piece]()
    for piece in pieces:
        if result and result[-1].value is piece.value and result[-1].end == piece.start:
            piece = Piece(piece.value, result.pop().start, piece.end)
        result.append(piece)
    return result


class Pieces(Builder):
    """Joins pieces into values, in a graph whose nodes are visited in order; equal slices become one node.

    Attributes:
        slices: the value of each slice that exists already, by (piece, axis).
    """

    def __init__(self, graph: ir.Graph, name: str) -> None:
        super().__init__(graph, name)
        self.slices: dict[tuple[Piece, int], ir.Value] = {}

    def joined(self, pieces: Iterable[Piece], axis: int) -> ir.Value:
        """Return one value that consists of the pieces along an axis."""
        parts = list[ir.Value]()
        for piece in _merged(pieces):
            value, start, end = piece
            if (start, end) != (0, size_along(value, axis)):
                if (piece, axis) not in self.slices:
                    self.slices[piece, axis] = self.slice(value, axis, start, end)
                value = self.slices[piece, axis]
            parts.append(value)
        return self.concat(parts, axis)
