"""A value as a row of pieces of other values along one axis, and the fewest operators that put such a row together.

Slices, joins, selections and writes only move numbers. As pieces they are one thing, so that a slice of a join is a
piece of what was joined, and pieces that follow each other in one value are one again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from txl_export.graphs.quantised_matmul import initializer

_SAID = 8
"""Constants of fewer numbers are named after them."""


@dataclass(frozen=True)
class Piece:
    """The positions `start` … `end` - 1 of a value along an axis."""

    value: ir.Value
    start: int
    end: int


def constant(value: ir.Value | None) -> NDArray[Any] | None:
    """The numbers of a value that no run changes; None for others, and where an input only stands for a number."""
    if value is None or value.const_value is None or not value.is_initializer() or value.is_graph_input():
        return None
    return value.const_value.numpy()


def size_along(value: ir.Value | None, axis: int) -> int | None:
    """How many positions a value has along an axis; None where that is not known or not fixed."""
    if value is None or value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return None
    size = value.shape[axis]
    return size if isinstance(size, int) else None


def axis_of(node: ir.Node, value: ir.Value | None, default: int = 0) -> int | None:
    """The axis that a node names, counted from the front of a value."""
    if value is None or value.shape is None:
        return None
    axis = node.attributes.get_int("axis", default)
    return axis + len(value.shape) if axis < 0 else axis


def cut(pieces: Sequence[Piece], start: int, end: int) -> list[Piece]:
    """The positions `start` … `end` - 1 of a row of pieces."""
    found, at = list[Piece](), 0
    for piece in pieces:
        first, last = max(start - at, 0), min(end - at, piece.end - piece.start)
        if first < last:
            found.append(Piece(piece.value, piece.start + first, piece.start + last))
        at += piece.end - piece.start
    return found


def pieces_of(value: ir.Value, axis: int) -> list[Piece] | None:
    """What a value consists of along an axis, as far down as operators only move numbers; None where it is unknown."""
    size = size_along(value, axis)
    if size is None:
        return None
    node = value.producer()
    if node is not None and node.op_type == "Concat" and axis_of(node, value) == axis:
        rows = [pieces_of(part, axis) if part is not None else None for part in node.inputs]
        if None not in rows:
            return merged([piece for row in rows if row is not None for piece in row])
    source, place = (None, None) if node is None else _block(node, value, axis)
    if source is not None and place is not None:
        inside = pieces_of(source, axis)
        if inside is not None:
            return cut(inside, *place)
    return [Piece(value, 0, size)]


def _block(node: ir.Node, value: ir.Value, axis: int) -> tuple[ir.Value | None, tuple[int, int] | None]:
    """Of which value the result of a node is the positions [first, last) along an axis, all else being the same."""
    source = node.inputs[0] if node.inputs else None
    whole = size_along(source, axis)
    if whole is not None and node.op_type == "Slice":
        return source, slice_along(node, axis, whole)
    if node.op_type == "Split" and whole is not None and axis_of(node, source) == axis:
        sizes = [size_along(output, axis) for output in node.outputs]
        index = next(place for place, output in enumerate(node.outputs) if output is value)
        fixed = [size for size in sizes if size is not None]
        if len(fixed) == len(sizes):
            return source, (sum(fixed[:index]), sum(fixed[: index + 1]))
    if source is not None and added_axes(node) == [axis]:
        select = source.producer()  # one position, taken out and put back
        chosen = select.inputs[0] if select is not None and select.op_type == "Gather" else None
        if select is not None and chosen is not None and axis_of(select, chosen) == axis:
            place = selected(select, chosen, axis)
            return chosen, None if place is None else (place, place + 1)
    return None, None


def added_axes(node: ir.Node) -> list[int] | None:
    """The axes that an Unsqueeze adds, in the form of any opset; None for other nodes, and where they are computed."""
    if node.op_type != "Unsqueeze":
        return None
    said = constant(node.inputs[1]) if len(node.inputs) > 1 else np.array(node.attributes.get_ints("axes", ()))
    rank = None if node.outputs[0].shape is None else len(node.outputs[0].shape)
    return None if said is None or rank is None else [int(axis) % rank for axis in said.flat]


def slice_along(node: ir.Node, axis: int, size: int) -> tuple[int, int] | None:
    """The positions that a Slice takes along an axis of so many, where it takes all along the others."""
    if node.inputs[0] is None or node.inputs[0].shape is None:
        return None
    starts, ends, axes, steps = ([int(one) for one in found] if found is not None else None for found in _bounds(node))
    if starts is None or ends is None or len(starts) != 1 or (steps or [1]) != [1]:
        return None
    if (axes or [0])[0] % len(node.inputs[0].shape) != axis:
        return None
    start, end, _ = slice(starts[0], ends[0]).indices(size)
    return (start, end) if start < end else None


def _bounds(node: ir.Node) -> list[NDArray[Any] | None]:
    """Starts, ends, axes and steps of a Slice; None for what it leaves out, and starts None where one is computed."""
    given = [*node.inputs[1:], None, None][:4]
    found = [constant(one) for one in given]
    computed = any(one is not None and numbers is None for one, numbers in zip(given, found, strict=True))
    return [None] * 4 if computed else found


def selected(node: ir.Node, source: ir.Value, axis: int) -> int | None:
    """Which position a Gather takes, where it takes one and drops the axis."""
    index, size = constant(node.inputs[1]), size_along(source, axis)
    return None if index is None or index.ndim or size is None else int(index) % size


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """The same with pieces that follow each other in one value made one."""
    found = list[Piece]()
    for piece in pieces:
        if found and found[-1].value is piece.value and found[-1].end == piece.start:
            found[-1] = Piece(piece.value, found[-1].start, piece.end)
        else:
            found.append(piece)
    return found


class Pieces:
    """Puts rows of pieces together in a graph whose nodes are visited in order; equal slices are one node.

    Args:
        graph: that is changed.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._graph, self._number = graph, 0
        self._slices: dict[tuple[int, int, int, int], ir.Value] = {}

    def know(self, value: ir.Value, piece: Piece, axis: int) -> None:
        """Let a value be read wherever the piece that it is is wanted again."""
        self._slices.setdefault((id(piece.value), axis, piece.start, piece.end), value)

    def joined(self, before: ir.Node, pieces: Sequence[Piece], axis: int) -> ir.Value:
        """The value that consists of the pieces, from nodes in front of one."""
        parts = [self._one(before, piece, axis) for piece in pieces]
        if len(parts) == 1:
            return parts[0]
        shape = _with_size(parts[0], axis, sum(piece.end - piece.start for piece in pieces))
        return self.add(before, "Concat", parts, shape, axis=axis)

    def _one(self, before: ir.Node, piece: Piece, axis: int) -> ir.Value:
        if (piece.start, piece.end) == (0, size_along(piece.value, axis)):
            return piece.value
        key = (id(piece.value), axis, piece.start, piece.end)
        if key not in self._slices:
            inputs = [piece.value, *(self.numbers(one) for one in (piece.start, piece.end, axis))]
            self._slices[key] = self.add(
                before, "Slice", inputs, _with_size(piece.value, axis, piece.end - piece.start)
            )
        return self._slices[key]

    def numbers(self, *numbers: int, index: bool = False) -> ir.Value:
        """A constant [n], or an index: int32, and one number for one."""
        made = np.array(numbers[0] if index and len(numbers) == 1 else numbers, np.int32 if index else np.int64)
        said = ".".join(map(str, numbers)) if len(numbers) < _SAID else hashlib.sha256(made.tobytes()).hexdigest()[:12]
        return initializer(self._graph, f"pieces.{'index' if index else 'is'}.{said}", made)

    def add(
        self, before: ir.Node, kind: str, inputs: Sequence[ir.Value], shape: ir.Shape | None, **attributes: Any
    ) -> ir.Value:
        """The result of one more node in front of another, of the first input's type."""
        self._number += 1
        node = ir.node(kind, inputs, attributes=attributes, name=f"{kind}.{before.name}.{self._number}")
        made = node.outputs[0]
        made.name, made.type, made.shape = str(node.name), inputs[0].type, shape
        self._graph.insert_before(before, node)
        return made

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Let a value be read in place of another, which may be a result of the graph."""
        node = old.producer()
        assert node is not None
        if old.is_graph_output():
            if new.producer() is None or new.is_graph_output():
                new = self.add(node, "Identity", [new], old.shape)
            name, old.name = old.name, f"{old.name}.before"
            new.name, new.type, new.shape = name, old.type, old.shape
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def _with_size(value: ir.Value, axis: int, size: int) -> ir.Shape | None:
    if value.shape is None:
        return None
    return ir.Shape([size if place == axis else known for place, known in enumerate(value.shape.dims)])
