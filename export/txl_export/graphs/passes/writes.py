"""Writes into a tensor at fixed positions, as joins of what stays and what is new.

`cache[:, 2] = new` is captured as ScatterElements or ScatterND. These copy the whole tensor and then look up a place
for every number or row, in a constant that is as large as what is written; and they stand between transposes, as they
write along the first axis. A join copies each part once, and it can be joined with what is read from it.
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
"""A write that leaves more parts is a selection from the tensor and the new values, one behind the other."""


def join_writes(graph: ir.Graph) -> None:
    """Let each write whose positions are constants be a join, in place; others stay."""
    made = Pieces(graph, "write")
    for node in list(graph):
        replaces = node.attributes.get_string("reduction", "none") == "none"
        data, index, new = node.inputs if node.op_type in ("ScatterND", "ScatterElements") and replaces else [None] * 3
        if data is None or index is None or new is None or (places := _places(node, data, index, new)) is None:
            continue
        made.at(node)
        turn = _turn(data) or list(range(len(sizes_of(data))))
        back = np.argsort(turn).tolist()
        inside = {turn[axis]: found for axis, found in places.items()}
        written = _written(made, _turned(made, data, back), inside, _turned(made, new, back))
        if written is None:
            continue
        result = node.outputs[0]
        for user in [use.node for use in result.uses()]:
            if more := _turn(user.outputs[0]):
                made.at(user).replace(user.outputs[0], _turned(made, written, [turn[axis] for axis in more]))
        if result.uses() or result.is_graph_output():
            made.at(node).replace(result, _turned(made, written, turn))


def _places(node: ir.Node, data: ir.Value, index: ir.Value, new: ir.Value) -> dict[int, list[int]] | None:
    """Where a scatter writes along each axis, if it writes everywhere along the others; without axes that are open."""
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
    found = dict[int, list[int]]()
    for axis, coordinates in along.items():
        rows = np.moveaxis(coordinates, axis, 0).reshape(coordinates.shape[axis], -1)
        places, size = rows[:, 0].tolist(), size_along(data, axis)
        if (rows != rows[:, :1]).any():
            return None
        if size is not None and not (opened and axis == 0):
            found[axis] = [int(place) % size for place in places]
        elif not opened or not alike(data, new, {*along} - {0}) or places != list(range(len(places))):
            return None
    return found


def _index(index: ir.Value) -> tuple[NDArray[np.int64] | None, bool]:
    """The numbers of an index, and whether it is the first rows of them, as many as there are sequences."""
    node = index.producer()
    if node is not None and node.op_type == "Slice" and len(node.inputs) == 4:
        first, axes = constant(node.inputs[1]), constant(node.inputs[3])
        if first is not None and axes is not None and not first.any() and not axes.any():
            return constant(node.inputs[0]), True
    return constant(index), False


def _turn(value: ir.Value) -> list[int]:
    """How a value's axes were moved, where a Transpose made it."""
    node = value.producer()
    return [] if node is None or node.op_type != "Transpose" else order_of(node)


def _turned(made: Pieces, value: ir.Value, turn: Sequence[int]) -> ir.Value:
    """A value with its axes moved; what moved them before is left out."""
    node, earlier = value.producer(), _turn(value)
    if node is not None and earlier and node.inputs[0] is not None:
        value, turn = node.inputs[0], [earlier[axis] for axis in turn]
    return made.transpose(value, turn)


def _written(made: Pieces, data: ir.Value, places: dict[int, list[int]], new: ir.Value) -> ir.Value | None:
    """A tensor with new values at some places along one axis; None where they are some along several, or one twice."""
    partly = [(axis, found) for axis, found in places.items() if found != list(range(size_along(data, axis) or 0))]
    if not partly:
        return new
    (axis, found), *others = partly
    size = size_along(data, axis)
    if size is None or others or len(set(found)) < len(found):
        return None
    both, order = [Piece(data, 0, size), Piece(new, 0, len(found))], list(range(size))
    for number, place in enumerate(found):
        order[place] = size + number
    if sum(one + 1 != other for one, other in pairwise(order)) < _PARTS:
        return made.joined([piece for place in order for piece in cut(both, place, place + 1)], axis)
    return made.gather(made.joined(both, axis), order, axis)
