"""Rewrites a write at fixed positions of a tensor as a Concat of old and new parts.

`cache[:, 2] = new` is captured as ScatterElements or ScatterND. These copy the whole tensor, and need a constant with
the place of every written number or row. They write along the first axis, so transposes surround them. A Concat copies
each part once, and the pass `joins` can merge the Concat with later reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from txl_export.graphs.passes.joins import Piece, Pieces, cut
from txl_export.graphs.passes.values import alike, axis_of, constant, order_of, size_along, sizes_of

_PARTS = 8
"""Maximum number of parts of a write's Concat; a write with more parts becomes one Gather from old and new values
together."""


def join_writes(graph: ir.Graph) -> None:
    """Replace each write whose positions are constant by a Concat or Gather, in place; other writes stay."""
    pieces = Pieces(graph, "write")
    for node in list(graph):
        replaces = node.attributes.get_string("reduction", "none") == "none"
        data, index, new = node.inputs if node.op_type in ("ScatterND", "ScatterElements") and replaces else [None] * 3
        if data is None or index is None or new is None or (places := _places(node, data, index, new)) is None:
            continue
        pieces.at(node)
        turn = _turn(data) or list(range(len(sizes_of(data))))
        back = np.argsort(turn).tolist()
        inside = {turn[axis]: listed for axis, listed in places.items()}
        written = _written(pieces, _turned(pieces, data, back), inside, _turned(pieces, new, back))
        if written is None:
            continue
        result = node.outputs[0]
        for user in [use.node for use in result.uses()]:
            if more := _turn(user.outputs[0]):
                pieces.at(user).replace(user.outputs[0], _turned(pieces, written, [turn[axis] for axis in more]))
        if result.uses() or result.is_graph_output():
            pieces.at(node).replace(result, _turned(pieces, written, turn))


def _places(node: ir.Node, data: ir.Value, index: ir.Value, new: ir.Value) -> dict[int, list[int]] | None:
    """Return the positions that a scatter writes along each axis: {1: [0, 1]} if it writes data[:, 0:2].

    An open axis that is written whole is left out. Return None if positions are not constant, or if the positions of
    one axis depend on those of a second.
    """
    numbers, opened = _index(index)
    if numbers is None or not numbers.size or data.shape is None:
        return None
    if node.op_type == "ScatterND":
        along = dict(enumerate(np.moveaxis(numbers, -1, 0)))
        whole = numbers.ndim == len(along) + 1
    else:
        along = {axis_of(node, data): numbers}
        whole = alike(data, index, along)
    if not whole:
        return None
    places_by_axis = dict[int, list[int]]()
    for axis, coordinates in along.items():
        rows = np.moveaxis(coordinates, axis, 0).reshape(coordinates.shape[axis], -1)
        places, size = rows[:, 0].tolist(), size_along(data, axis)
        if (rows != rows[:, :1]).any():
            return None
        if size is not None and not (opened and axis == 0):
            places_by_axis[axis] = [int(place) % size for place in places]
        elif not opened or not alike(data, new, {*along} - {0}) or places != list(range(len(places))):
            return None
    return places_by_axis


def _index(index: ir.Value) -> tuple[NDArray[np.int64] | None, bool]:
    """Return an index's constant places, or None, and whether the graph cuts them to the number of its sequences.

    A graph whose batch size is open stores a place for each sequence that it can have, and reads the first ones.
    """
    node = index.producer()
    if node is not None and node.op_type == "Slice" and len(node.inputs) == 4:
        first, axes = constant(node.inputs[1]), constant(node.inputs[3])
        if first is not None and axes is not None and not first.any() and not axes.any():
            return constant(node.inputs[0]), True
    return constant(index), False


def _turn(value: ir.Value) -> list[int]:
    """Return the order of axes of the Transpose that made a value, e.g. [0, 2, 1]; [] if none made it."""
    node = value.producer()
    return [] if node is None or node.op_type != "Transpose" else order_of(node)


def _turned(pieces: Pieces, value: ir.Value, turn: Sequence[int]) -> ir.Value:
    """Transpose a value; if a Transpose made the value, both become one."""
    node, earlier = value.producer(), _turn(value)
    if node is not None and earlier and node.inputs[0] is not None:
        value, turn = node.inputs[0], [earlier[axis] for axis in turn]
    return pieces.transpose(value, turn)


def _written(pieces: Pieces, data: ir.Value, places: dict[int, list[int]], new: ir.Value) -> ir.Value | None:
    """Write new values at places along one axis; return None if places are repeated or partial on several axes."""
    partly = [(axis, listed) for axis, listed in places.items() if listed != list(range(size_along(data, axis) or 0))]
    if not partly:
        return new
    (axis, listed), *others = partly
    size = size_along(data, axis)
    if size is None or others or len(set(listed)) < len(listed):
        return None
    both, order = [Piece(data, 0, size), Piece(new, 0, len(listed))], list(range(size))
    for number, place in enumerate(listed):
        order[place] = size + number
    if sum(one + 1 != other for one, other in pairwise(order)) < _PARTS:
        return pieces.joined([piece for place in order for piece in cut(both, place, place + 1)], axis)
    return pieces.gather(pieces.joined(both, axis), order, axis)
