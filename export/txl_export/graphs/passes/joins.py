"""Slices of joins read what was joined, joins of joins join once, and slices that follow each other are one again.

Slices, joins, selections and writes only move numbers. So a value is seen as a row of pieces of other values along one
axis, and a step that writes a cache by slices and reads it by slices costs what it would if it had been joined once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from txl_export.graphs.quantised_matmul import initializer


class Piece(NamedTuple):
    """The positions `start` … `end` - 1 of a value along an axis."""

    value: ir.Value
    start: int
    end: int


def join_once(graph: ir.Graph) -> None:
    """Let each slice, selection and join of a graph read the values that its numbers come from, in place."""
    made = Pieces(graph)
    for node in list(graph):
        for result in node.outputs if node.op_type in ("Concat", "Slice", "Split", "Gather") else ():
            source = node.inputs[0] if node.op_type == "Gather" else result
            for axis in range(len(source.shape) if source is not None and source.shape is not None else 0):
                (_select if node.op_type == "Gather" else _read)(made, node, result, axis)


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


def _select(made: Pieces, node: ir.Node, result: ir.Value, axis: int) -> None:
    """Let one position, whose axis is dropped, be selected from the value that it comes from."""
    one = selected(node, axis)
    pieces = [] if one is None else cut(pieces_of(one.value, axis), one.start, one.end)
    if not pieces or pieces[0].value is node.inputs[0]:
        return
    added = pieces[0].value.producer()
    if added is not None and added.inputs and added.inputs[0] is not None and added_axes(added) == [axis]:
        made.replace(result, added.inputs[0])
    else:
        index = made.numbers(pieces[0].start, index=True)
        made.replace(result, made.add(node, "Gather", [pieces[0].value, index], result.shape, axis=axis))


def constant(value: ir.Value | None) -> NDArray[Any] | None:
    """The numbers of a value that no run changes; None for others."""
    if value is None or value.const_value is None or not value.is_initializer() or value.is_graph_input():
        return None
    return value.const_value.numpy()


def size_along(value: ir.Value | None, axis: int) -> int | None:
    """How many positions a value has along an axis; None where that is not known or open."""
    size = value.shape[axis] if value is not None and value.shape is not None and axis < len(value.shape) else None
    return size if isinstance(size, int) else None


def selected(node: ir.Node, axis: int) -> Piece | None:
    """The position that a Gather takes along an axis, where it takes one and drops the axis."""
    source = node.inputs[0] if node.op_type == "Gather" else None
    size, index = size_along(source, axis), constant(node.inputs[1]) if source is not None else None
    if source is None or size is None or index is None or index.ndim or _axis(node, source) != axis:
        return None
    return Piece(source, int(index) % size, int(index) % size + 1)


def added_axes(node: ir.Node | None) -> list[int]:
    """The axes that an Unsqueeze adds, in the form of any opset; none where they are computed."""
    if node is None or node.op_type != "Unsqueeze" or node.outputs[0].shape is None:
        return []
    said = constant(node.inputs[1]) if len(node.inputs) > 1 else np.array(node.attributes.get_ints("axes", ()))
    return [] if said is None else [int(axis) % len(node.outputs[0].shape) for axis in said.flat]


def pieces_of(value: ir.Value | None, axis: int) -> list[Piece]:
    """What a value consists of along an axis, as far down as operators only move numbers; [] where it is unknown."""
    size = size_along(value, axis)
    if value is None or size is None:
        return []
    node = value.producer()
    if node is not None and node.op_type == "Concat" and _axis(node, value) == axis:
        rows = [pieces_of(part, axis) for part in node.inputs]
        if all(rows):
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


def _axis(node: ir.Node, value: ir.Value) -> int | None:
    """The axis that a node names, counted from the front of a value."""
    return None if value.shape is None else node.attributes.get_int("axis", 0) % len(value.shape)


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
        slices: the values that pieces are, by the axis along which they are pieces.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.slices: dict[tuple[Piece, int], ir.Value] = {}
        self._graph, self._number = graph, 0

    def joined(self, before: ir.Node, pieces: Iterable[Piece], axis: int) -> ir.Value:
        """The value that consists of the pieces, from nodes in front of one."""
        parts, row = list[ir.Value](), _merged(pieces)
        for piece in row:
            whole = (piece.start, piece.end) == (0, size_along(piece.value, axis))
            if not whole and (piece, axis) not in self.slices:
                inputs = [piece.value, *(self.numbers(one) for one in (piece.start, piece.end, axis))]
                shape = _with_size(piece.value, axis, piece.end - piece.start)
                self.slices[piece, axis] = self.add(before, "Slice", inputs, shape)
            parts.append(piece.value if whole else self.slices[piece, axis])
        if len(parts) == 1:
            return parts[0]
        shape = _with_size(parts[0], axis, sum(piece.end - piece.start for piece in row))
        return self.add(before, "Concat", parts, shape, axis=axis)

    def numbers(self, *numbers: int, index: bool = False) -> ir.Value:
        """A constant [n], or an index: int32, and one number for one."""
        made = np.array(numbers[0] if index and len(numbers) == 1 else numbers, np.int32 if index else np.int64)
        return initializer(self._graph, f"{'places' if index else 'bounds'}.{'.'.join(map(str, numbers))}", made)

    def add(
        self, before: ir.Node, kind: str, inputs: Sequence[ir.Value], shape: ir.Shape | None, **attributes: Any
    ) -> ir.Value:
        """The result of one more node in front of another, of the first input's type."""
        self._number += 1
        node = ir.node(kind, inputs, attributes=attributes, name=f"{kind}.{before.name}.{self._number}")
        made = node.outputs[0]
        made.name, made.type, made.shape = node.name, inputs[0].type, shape
        self._graph.insert_before(before, node)
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
