"""Slices of joins read what was joined, joins of joins join once, and slices that follow each other are one again.

Slices, joins, selections and writes only move numbers. So a value is seen as a row of pieces of other values along one
axis, and a step that writes a cache by slices and reads it by slices costs what it would if it had been joined once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from txl_export.graphs.quantised_matmul import initializer

_MOST = 64
"""A join of joins reads at most so many values, so that a loop that moves a cache T times reads no T²."""


class Piece(NamedTuple):
    """The positions `start` … `end` - 1 of a value along an axis."""

    value: ir.Value
    start: int
    end: int


def join_once(graph: ir.Graph) -> None:
    """Let each slice, selection and join of a graph read the values that its numbers come from, in place."""
    made = Pieces(graph)
    for node in list(graph):
        if node.op_type == "Gather":
            _select(made, node)
        for result in node.outputs if node.op_type in ("Concat", "Slice", "Split") else ():
            for axis in range(len(result.shape or ())):
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
        made.replace(result, made.joined(node, pieces, axis))


def _select(made: Pieces, node: ir.Node) -> None:
    """Let one position, whose axis is dropped, be selected from the value that it comes from."""
    source, index = node.inputs[0], constant(node.inputs[1])
    axis = _axis(node, source)
    size = size_along(source, axis)
    if size is None or index is None or index.ndim:
        return
    (piece,) = cut(pieces_of(source, axis), int(index) % size, int(index) % size + 1)
    added = piece.value.producer()
    inner = added.inputs[0] if added is not None and added.op_type in ("Unsqueeze", "Reshape") else None
    if inner is not None and alike(inner, node.outputs[0]):  # so the axis has one position
        made.replace(node.outputs[0], inner)
    elif piece.value is not source:
        place = initializer(made.graph, f"place.{piece.start}", np.array(piece.start, np.int32))
        made.replace(node.outputs[0], made.add(node, "Gather", [piece.value, place], node.outputs[0].shape, axis=axis))


def alike(one: ir.Value, other: ir.Value, apart: Collection[int] = ()) -> bool:
    """Whether two values have the same sizes along all axes but some."""
    if one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        return False
    pairs = enumerate(zip(one.shape.dims, other.shape.dims, strict=True))
    return all(axis in apart or (a == b and (isinstance(a, int) or a.value is not None)) for axis, (a, b) in pairs)


def constant(value: ir.Value | None) -> NDArray[Any] | None:
    """The numbers of a value that no run changes; None for others."""
    if value is None or value.const_value is None or not value.is_initializer() or value.is_graph_input():
        return None
    return value.const_value.numpy()


def size_along(value: ir.Value | None, axis: int) -> int | None:
    """How many positions a value has along an axis; None where that is not known or open."""
    size = value.shape[axis] if value is not None and value.shape is not None and 0 <= axis < len(value.shape) else None
    return size if isinstance(size, int) else None


def pieces_of(value: ir.Value | None, axis: int) -> list[Piece]:
    """What a value consists of along an axis, as far down as operators only move numbers; [] where it is unknown."""
    size = size_along(value, axis)
    if value is None or size is None:
        return []
    node = value.producer()
    if node is not None and node.op_type == "Concat" and _axis(node, value) == axis:
        rows = [pieces_of(part, axis) for part in node.inputs]
        if all(rows) and sum(map(len, rows)) <= max(_MOST, len(rows)):
            return _merged(piece for row in rows for piece in row)
    block = None if node is None else _block(node, value, axis)
    return [Piece(value, 0, size)] if block is None else cut(pieces_of(block.value, axis), block.start, block.end)


def cut(pieces: Iterable[Piece], start: int, end: int) -> list[Piece]:
    """The positions `start` … `end` - 1 of a row of pieces."""
    found, at = list[Piece](), 0
    for value, first, last in pieces:
        low, high = max(start, at), min(end, at + last - first)
        if low < high:
            found.append(Piece(value, first + low - at, first + high - at))
        at += last - first
    return found


def _axis(node: ir.Node, value: ir.Value | None) -> int:
    """The axis that a node names, counted from the front of a value; -1 where that is not known."""
    return node.attributes.get_int("axis", 0) % len(value.shape) if value is not None and value.shape else -1


def _block(node: ir.Node, value: ir.Value, axis: int) -> Piece | None:
    """Of which value the result of a node is a piece."""
    source = node.inputs[0] if node.inputs else None
    size = size_along(source, axis)
    if source is None or source.shape is None or size is None:
        return None
    if node.op_type == "Slice":
        said = [constant(one) for one in node.inputs[1:]]
        given = [int(one.item()) for one in said if one is not None and one.size == 1]
        if len(given) == len(said):
            start, end, along, step = [*given, 0, 1][:4] if len(given) < 3 else [*given, 1][:4]
            first, last, _ = slice(start, end).indices(size)
            if along % len(source.shape) == axis and step == 1 and first < last:
                return Piece(source, first, last)
    elif node.op_type == "Split" and _axis(node, source) == axis:
        sizes = [size_along(output, axis) or 0 for output in node.outputs]
        first = sum(sizes[: value.index()])
        return Piece(source, first, first + sizes[value.index() or 0]) if sum(sizes) == size else None
    return None


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    """The same with pieces that follow each other in one value made one."""
    found = list[Piece]()
    for piece in pieces:
        if found and found[-1].value is piece.value and found[-1].end == piece.start:
            piece = Piece(piece.value, found.pop().start, piece.end)
        found.append(piece)
    return found


class Pieces:
    """Puts rows of pieces together in a graph whose nodes are visited in order; equal slices are one node.

    Attributes:
        graph: that is changed.
        slices: the values that pieces are, by the axis along which they are pieces.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.slices: dict[tuple[Piece, int], ir.Value] = {}
        self.graph, self._number = graph, 0

    def joined(self, before: ir.Node, pieces: Iterable[Piece], axis: int) -> ir.Value:
        """The value that consists of the pieces, from nodes in front of one."""
        parts, row = list[ir.Value](), _merged(pieces)
        for piece in row:
            whole = (piece.start, piece.end) == (0, size_along(piece.value, axis))
            if not whole and (piece, axis) not in self.slices:
                bounds = ((f"bound.{one}", np.array([one])) for one in (piece.start, piece.end, axis))
                inputs = [piece.value, *(initializer(self.graph, *bound) for bound in bounds)]
                shape = _with_size(piece.value, axis, piece.end - piece.start)
                self.slices[piece, axis] = self.add(before, "Slice", inputs, shape)
            parts.append(piece.value if whole else self.slices[piece, axis])
        if len(parts) == 1:
            return parts[0]
        shape = _with_size(parts[0], axis, sum(piece.end - piece.start for piece in row))
        return self.add(before, "Concat", parts, shape, axis=axis)

    def add(
        self, before: ir.Node, kind: str, inputs: Sequence[ir.Value], shape: ir.Shape | None, **attributes: Any
    ) -> ir.Value:
        """The result of one more node in front of another, of the first input's type."""
        self._number += 1
        node = ir.node(kind, inputs, attributes=attributes, name=f"{kind}.{before.name}.{self._number}")
        made = node.outputs[0]
        made.name, made.type, made.shape = node.name, inputs[0].type, shape
        self.graph.insert_before(before, node)
        return made

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Let a value be read in place of another, which may be a result of the graph."""
        node = old.producer()
        if node is not None and old.is_graph_output():
            if new.producer() is None or new.is_graph_output():
                new = self.add(node, "Identity", [new], old.shape)
            name, old.name = old.name, f"{old.name}.before"
            new.name, new.type, new.shape = name, old.type, old.shape
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def _with_size(value: ir.Value, axis: int, size: int) -> ir.Shape:
    assert value.shape is not None
    return ir.Shape([size if place == axis else known for place, known in enumerate(value.shape.dims)])
