"""Writes into a tensor at fixed positions, as joins of what stays and what is new.

`cache[:, 2] = new` is captured as ScatterElements or ScatterND. These copy the whole tensor and then look up a place
for every number or row, in a constant that is as large as what is written; and they stand between transposes, as they
write along the first axis. A join copies each part once, and it can be joined with what is read from it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from txl_export.graphs.passes.pieces import Piece, Pieces, constant, merged, size_along

_PARTS = 8
"""A write that leaves more parts is a selection from the tensor and the new values, one behind the other."""


def join_writes(graph: ir.Graph) -> None:
    """Let each write whose positions are constants be a join, in place; others stay."""
    made = Pieces(graph)
    for node in list(graph):
        if (
            node.op_type in ("ScatterND", "ScatterElements")
            and node.attributes.get_string("reduction", "none") == "none"
        ):
            data, index, new = node.inputs[:3]
            if data is None or index is None or new is None or data.shape is None:
                continue
            places = (_of_rows if node.op_type == "ScatterND" else _of_elements)(node, data, index, new)
            if places is None:
                continue
            turn = _turn(data) or tuple(range(len(data.shape)))
            back = tuple(int(one) for one in np.argsort(turn))
            written = _written(
                made,
                node,
                _turned(made, node, data, back),
                {turn[axis]: numbers for axis, numbers in places.items()},
                _turned(made, node, new, back),
            )
            if written is not None:
                _put(made, node, written, turn)


def _of_rows(node: ir.Node, data: ir.Value, index: ir.Value, new: ir.Value) -> dict[int, list[int]] | None:
    """Where a ScatterND writes along each axis, the axes apart along which it writes everywhere, in order."""
    numbers, opened = _index(index)
    count = 0 if numbers is None else numbers.shape[-1]
    if numbers is None or numbers.ndim != count + 1 or 0 in numbers.shape or not _alike(data, new, set(range(count))):
        return None
    found = dict[int, list[int]]()
    for axis in range(count):
        along = np.moveaxis(numbers[..., axis], axis, 0)
        if (along != along.reshape(len(along), -1)[:, :1].reshape(-1, *[1] * (count - 1))).any():
            return None
        places, size = along.reshape(len(along), -1)[:, 0].tolist(), size_along(data, axis)
        if opened and axis == 0:
            if not _alike(data, new, set(range(1, count))) or places != list(range(len(places))):
                return None
        elif size is None:
            return None
        else:
            found[axis] = [int(place) % size for place in places]
    return found


def _of_elements(node: ir.Node, data: ir.Value, index: ir.Value, new: ir.Value) -> dict[int, list[int]] | None:
    """Where a ScatterElements writes along its axis, if it writes everywhere along the others."""
    assert data.shape is not None
    axis = node.attributes.get_int("axis", 0) % len(data.shape)
    size, (numbers, opened) = size_along(data, axis), _index(index)
    if numbers is None or size is None or numbers.size == 0 or (opened and axis == 0):
        return None
    along = np.moveaxis(numbers, axis, 0).reshape(numbers.shape[axis], -1)
    if (along != along[:, :1]).any() or not _alike(data, new, {axis}) or not _alike(data, index, {axis}):
        return None
    return {axis: [int(place) % size for place in along[:, 0]]}


def _index(index: ir.Value) -> tuple[NDArray[np.int64] | None, bool]:
    """The numbers of an index, and whether it is the first rows of them, as many as there are sequences."""
    numbers, node = constant(index), index.producer()
    if numbers is None and node is not None and node.op_type == "Slice" and len(node.inputs) == 4:
        first, axes = constant(node.inputs[1]), constant(node.inputs[3])
        if first is not None and axes is not None and not first.any() and not axes.any():
            return constant(node.inputs[0]), True
    return numbers, False


def _alike(one: ir.Value, other: ir.Value, apart: set[int]) -> bool:
    """Whether two values have the same sizes along all axes but some."""
    if one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        return False
    pairs = enumerate(zip(one.shape.dims, other.shape.dims, strict=True))
    return all(axis in apart or (a == b and (isinstance(a, int) or a.value is not None)) for axis, (a, b) in pairs)


def _turn(value: ir.Value) -> tuple[int, ...] | None:
    """How a value's axes were moved, where a Transpose made it."""
    node = value.producer()
    if node is None or node.op_type != "Transpose" or value.shape is None:
        return None
    return tuple(node.attributes.get_ints("perm", range(len(value.shape))[::-1]))


def _turned(made: Pieces, before: ir.Node, value: ir.Value, turn: Sequence[int]) -> ir.Value:
    """A value with its axes moved; what moved them before is left out."""
    node, earlier = value.producer(), _turn(value)
    if node is not None and earlier and node.inputs[0] is not None:
        value, turn = node.inputs[0], [earlier[axis] for axis in turn]
    if list(turn) == sorted(turn):
        return value
    shape = None if value.shape is None else ir.Shape([value.shape.dims[axis] for axis in turn])
    return made.add(before, "Transpose", [value], shape, perm=list(turn))


def _written(
    made: Pieces, before: ir.Node, data: ir.Value, places: dict[int, list[int]], new: ir.Value
) -> ir.Value | None:
    """A tensor with new values at some places along each of some axes; None where that cannot be told."""
    whole = {axis: size_along(data, axis) for axis in places}
    places = {axis: found for axis, found in places.items() if found != list(range(whole[axis] or 0))}
    if any(len(set(found)) < len(found) for found in places.values()):
        return None
    if not places:
        return new
    (axis, found), *others = places.items()
    size = whole[axis]
    if size is None:
        return None
    if others:
        if found != list(range(found[0], found[-1] + 1)):
            return None
        inside = made.joined(before, [Piece(data, found[0], found[-1] + 1)], axis)
        changed = _written(made, before, inside, dict(others), new)
        if changed is None:
            return None
        new = changed
    sources = [Piece(data, place, place + 1) for place in range(size)]
    for number, place in enumerate(found):
        sources[place] = Piece(new, number, number + 1)
    pieces = merged(sources)
    if len(pieces) <= _PARTS:
        return made.joined(before, pieces, axis)
    both = made.joined(before, [Piece(data, 0, size), Piece(new, 0, len(found))], axis)
    order = list(range(size))
    for number, place in enumerate(found):
        order[place] = size + number
    return made.add(before, "Gather", [both, made.numbers(*order, index=True)], data.shape, axis=axis)


def _put(made: Pieces, node: ir.Node, written: ir.Value, turn: Sequence[int]) -> None:
    """Let a value with its axes moved stand for a write's result, and for those that only move them back."""
    result = node.outputs[0]
    for user in [use.node for use in result.uses()]:
        more = _turn(user.outputs[0])
        if more is not None:
            made.replace(user.outputs[0], _turned(made, user, written, [turn[axis] for axis in more]))
    if result.uses() or result.is_graph_output():
        made.replace(result, _turned(made, node, written, turn))
