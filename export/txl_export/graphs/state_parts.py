"""States taken apart, so that what depends on a part of a state depends on that part alone.

* state' = stack(one layer's row, another's): two states, of a layer each.
* window' = concat(window[1:], x): a state of each row; the next row k is row k + 1, and the last one x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from txl_runtime.guard.graph_check import SIDES

from txl_export.graphs.passes.builder import Builder
from txl_export.graphs.passes.joins import Piece, join_once, pieces_of
from txl_export.graphs.passes.values import numbers_of, size_of, sizes_of


class Stack(NamedTuple):
    """A state that is its parts, joined along an axis, or one part with that axis `added`."""

    state: ir.Value
    parts: Sequence[ir.Value]
    axis: int
    added: bool

    def apart(self, build: Builder, whole: ir.Value) -> Sequence[ir.Value]:
        """The parts of a value."""
        if self.added:
            return [build.op("Squeeze", [whole, build.numbers(self.axis)])]
        return build.split(whole, [int(size_of(part, self.axis) or 0) for part in self.parts], self.axis)

    def together(self, build: Builder, parts: Sequence[ir.Value]) -> ir.Value:
        """The value that has these parts."""
        if self.added:
            return build.op("Unsqueeze", [*parts, build.numbers(self.axis)], self.state.shape)
        return build.concat(parts, self.axis)


def take_apart(model: ir.Model, count: int) -> list[Stack]:
    """Make parts of states inputs and outputs of their own, in place.

    Args:
        model: whose last `count` inputs are states, and whose last outputs are their next values in the same order.

    Returns:
        what was taken apart, each before its own parts. All that is left of the states, in parts or whole, are the
        model's last inputs and outputs.
    """
    graph, stacks, before = model.graph, list[Stack](), -1
    rows = set[ir.Value]()  # of windows; they are handed on, whatever they are made of
    front, back = Builder(graph, "whole"), Builder(graph, "part")
    places = len(graph.inputs) - count, len(graph.outputs) - count
    while len(stacks) > before:  # a state is seen to be put together once its parts are read in place of it
        before, left = len(stacks), list(zip(graph.inputs[places[0] :], graph.outputs[places[1] :], strict=True))
        del graph.inputs[places[0] :], graph.outputs[places[1] :]
        for state, after in left:
            axis, added, pieces = _pieces(state, original(after))
            if not pieces or state in rows:
                graph.inputs.append(state)
                graph.outputs.append(after)
                continue
            stack = Stack(state, [_part(state, axis, added, piece, at) for at, piece in enumerate(pieces)], axis, added)
            rows.update(stack.parts if any(value is state for value, _, _ in pieces) else ())
            whole = stack.together(front.at(graph[0]), stack.parts)
            ir.convenience.replace_all_uses_with(state, whole)
            for part, (value, start, end) in zip(stack.parts, pieces, strict=True):
                if value is state:
                    value = stack.parts[start]
                elif not added and (start, end) != (0, size_of(value, axis)):
                    value = back.slice(value, axis, start, end)
                graph.inputs.append(part)
                graph.outputs.append(back.op("Identity", [value], value.shape))  # each is a result of its own
            stacks.append(stack)
        join_once(graph)
        RemoveUnusedNodesPass()(model)
    return stacks


def original(value: ir.Value) -> ir.Value:
    """The value that another is without any change."""
    while (node := value.producer()) is not None and node.op_type == "Identity" and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def _pieces(state: ir.Value, after: ir.Value) -> tuple[int, bool, list[Piece]]:
    """The axis along which a state's next value is put together, whether it is only added, and of what, if of any."""
    node, sizes = after.producer(), sizes_of(state)
    axes = numbers_of(node.inputs[1]) if node is not None and node.op_type == "Unsqueeze" else None
    if node is not None and axes is not None and len(axes) == 1 and node.inputs[0] is not None:
        return axes[0] % len(sizes), True, [Piece(node.inputs[0], 0, 1)]
    for axis in (axis for axis, size in enumerate(sizes) if isinstance(size, int)):
        pieces = pieces_of(after, axis)
        if len(pieces) > 1 and any(value is state for value, _, _ in pieces):  # a window: rows move, one by one
            pieces = [Piece(value, row, row + 1) for value, start, end in pieces for row in range(start, end)]
        if 1 < len(pieces) <= SIDES:
            return axis, False, pieces
    return 0, False, []


def _part(state: ir.Value, axis: int, added: bool, piece: Piece, number: int) -> ir.Value:
    sizes = [*sizes_of(state)]
    sizes[axis : axis + 1] = [] if added else [piece.end - piece.start]
    return ir.Value(name=f"{state.name}.{number}", type=state.type, shape=ir.Shape(sizes))
