"""Merges chains of nodes that change only a value's axes, not the order of its numbers, into one node or none.

Exporters write such chains: axes of size 1 are added, moved to the front and removed around a recurrent operator.
Reshape, Squeeze and Unsqueeze keep the order of numbers. So do a Transpose that moves only axes of size 1, and a Gather
or Slice of everything.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from txl_export.graphs.passes.builder import Builder
from txl_export.graphs.passes.values import Size, axis_of, numbers_of, order_of, size_of, sizes_of, to_reshape

_ALWAYS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})


def join_moves(graph: ir.Graph) -> None:
    """Replace each chain of such nodes by one node, in place; values have shapes as far as these are known."""
    origins, moves = dict[ir.Value, ir.Value](), dict[tuple[ir.Value, tuple[Size, ...]], ir.Value]()
    build = Builder(graph, "move")
    for node in list(graph):
        source, result = node.inputs[0] if node.inputs else None, node.outputs[0]
        if source is None or result.shape is None or not _keeps_order(node):
            continue
        origin = origins[result] = origins.get(source, source)
        sizes_before, sizes = sizes_of(origin), sizes_of(result)
        if origin.shape is None or 0 in sizes:
            continue
        key = (origin, sizes)
        if sizes_before == sizes and None not in sizes:
            inside = origin.producer() is not None and not origin.is_graph_output()
            if inside or not result.is_graph_output():
                build.replace(result, origin)
        elif key in moves and None not in sizes and not result.is_graph_output():
            build.replace(result, moves[key])
        else:
            if origin is not source or node.op_type not in _ALWAYS:
                one = _move(build.at(node), origin, sizes)
                if one is None:
                    continue
                build.replace(result, one)
                result, origins[one] = one, origin
            moves.setdefault(key, result)


def _keeps_order(node: ir.Node) -> bool:
    """Return whether a node's first result has all values of its first input in the same order, as after a Reshape."""
    source, sizes = node.inputs[0], sizes_of(node.inputs[0])
    if node.op_type in _ALWAYS or not sizes:
        return node.op_type in _ALWAYS
    if node.op_type == "Transpose":
        larger = [axis for axis in order_of(node) if sizes[axis] != 1]
        return larger == sorted(larger)
    if node.op_type == "Gather":
        return size_of(source, axis_of(node, source)) == 1 and numbers_of(node.inputs[1]) in ([0], [-1])
    if node.op_type == "Slice":
        steps = node.inputs[4] if len(node.inputs) > 4 else None
        forward = steps is None or set(numbers_of(steps) or (0,)) == {1}
        return forward and None not in sizes and sizes == sizes_of(node.outputs[0])
    return False


def _move(build: Builder, origin: ir.Value, wanted: Sequence[Size]) -> ir.Value | None:
    """Return `origin` with the wanted sizes; None if no node with constant numbers can give it these sizes."""
    sizes_before = sizes_of(origin)
    for kind, more, fewer in (("Squeeze", sizes_before, wanted), ("Unsqueeze", wanted, sizes_before)):
        if axes := _left_out(more, fewer):
            return build.op(kind, [origin, build.numbers(*axes)])
    return build.reshape(origin, wanted) if to_reshape(wanted).count(-1) < 2 else None


def _left_out(more: Sequence[Size], fewer: Sequence[Size]) -> list[int]:
    """Return the axes of size 1 whose removal turns `more` into `fewer`; [] if no removal does."""
    axes, rest = list[int](), list(fewer)
    for axis, size in enumerate(more):
        if rest and size == rest[0] and size is not None:
            del rest[0]
        elif size == 1:
            axes.append(axis)
        else:
            return []
    return [] if rest else axes
