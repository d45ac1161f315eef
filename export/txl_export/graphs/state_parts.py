"""Splits states into parts, so that values which depend on one part no longer depend on the whole state.

* state' = stack(row of layer 0, row of layer 1) becomes two states, one per layer.
* window' = concat(window[1:], x) becomes one state per row: next row k is row k + 1, and the last next row is x.
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
    """A state that consists of parts along an axis; if `added`, of one part without that axis."""

    state: ir.Value
    parts: Sequence[ir.Value]
    axis: int
    added: bool

    def apart(self, build: Builder, whole: ir.Value) -> Sequence[ir.Value]:
        """Return the parts of a value of the state."""
        if self.added:
            return [build.op("Squeeze", [whole, build.numbers(self.axis)])]
        return build.split(whole, [int(size_of(part, self.axis) or 0) for part in self.parts], self.axis)

    def together(self, build: Builder, parts: Sequence[ir.Value]) -> ir.Value:
        """Return the value of the state from its parts."""
        if self.added:
            return build.op("Unsqueeze", [*parts, build.numbers(self.axis)], self.state.shape)
        return build.concat(parts, self.axis)


def take_apart(model: ir.Model, count: int) -> list[Stack]:
    """Make parts of states separate inputs and outputs, in place.

    Args:
        model: the graph; its last `count` inputs are states, and its last outputs their next values in the same order.
        count: the number of states.

    Returns:
        The states that were split, each before its own parts. The model's last inputs and outputs are now the parts and
        the states that stay whole.
    """
    graph, stacks, before = model.graph, list[Stack](), -1
    rows = set[ir.Value]()  # rows of windows are not split again: they only move
    front, back = Builder(graph, "whole"), Builder(graph, "part")
    places = len(graph.inputs) - count, len(graph.outputs) - count
    while len(stacks) > before:  # repeat: splitting a state can show that a second one consists of parts
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
                graph.outputs.append(back.op("Identity", [value], value.shape))  # each output needs its own node
            stacks.append(stack)
        join_once(graph)
        RemoveUnusedNodesPass()(model)
    return stacks


def original(value: ir.Value) -> ir.Value:
    """Return the value on which the Identity nodes before `value` began; `value` itself if there are none."""
    while (node := value.producer()) is not None and node.op_type == "Identity" and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def _pieces(state: ir.Value, after: ir.Value) -> tuple[int, bool, list[Piece]]:
    """Return the axis along which a next value is joined, whether that axis is only added, and the pieces or []."""
    node, sizes = after.producer(), sizes_of(state)
    axes = numbers_of(node.inputs[1]) if node is not None and node.op_type == "Unsqueeze" else None
    if node is not None and axes is not None and len(axes) == 1 and node.inputs[0] is not None:
        return axes[0] % len(sizes), True, [Piece(node.inputs[0], 0, 1)]
    for axis in (axis for axis, size in enumerate(sizes) if isinstance(size, int)):
        pieces = pieces_of(after, axis)
        # If the state's own rows move on (e.g. the last 3 of 4, before a new row), every row becomes a piece.
        if len(pieces) > 1 and any(value is state for value, _, _ in pieces):
            pieces = [Piece(value, row, row + 1) for value, start, end in pieces for row in range(start, end)]
        if 1 < len(pieces) <= SIDES:
            return axis, False, pieces
    return 0, False, []


def _part(state: ir.Value, axis: int, added: bool, piece: Piece, number: int) -> ir.Value:
    sizes = [*sizes_of(state)]
    sizes[axis : axis + 1] = [] if added else [piece.end - piece.start]
    return ir.Value(name=f"{state.name}.{number}", type=state.type, shape=ir.Shape(sizes))
