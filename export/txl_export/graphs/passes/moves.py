"""One node, or none, for what only gives values other axes and leaves them in their order.

Exporters write such nodes in rows: axes of one are added, moved to the front and taken away again around a recurrent
operator. A Reshape, a Squeeze and an Unsqueeze leave all values in their order; so do a Transpose that moves axes of
one alone, and a Gather or a Slice of all that there is.
"""

from __future__ import annotations

import onnx_ir as ir

from txl_export.graphs.passes.sizes import Size, give_way, numbers, numbers_of, size_of, sizes_of

_ALWAYS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})


def join_moves(graph: ir.Graph) -> None:
    """Make each such row one node, in place; values have shapes, as far as they are known."""
    origins, made = dict[ir.Value, ir.Value](), dict[tuple[ir.Value, tuple[Size, ...]], ir.Value]()
    for node in list(graph):
        source, result = node.inputs[0] if node.inputs else None, node.outputs[0]
        sizes = sizes_of(result)
        if source is None or sizes is None or not _keeps_order(node):
            continue
        origin = origins[result] = origins.get(source, source)
        key = (origin, tuple(sizes))
        given = sizes_of(origin)
        if given is None or 0 in sizes:
            continue
        if given == sizes and None not in sizes:
            if not result.is_graph_output():
                ir.convenience.replace_all_uses_with(result, origin)
            elif origin.producer() is not None and not origin.is_graph_output():
                give_way(result, origin)
        elif key in made and None not in sizes and not result.is_graph_output():
            ir.convenience.replace_all_uses_with(result, made[key])
        else:
            if origin is not source or node.op_type not in _ALWAYS:
                one = _move(graph, origin, given, sizes)
                if one is None:
                    continue
                one.name = f"{node.name}.move"
                graph.insert_before(node, one)
                give_way(result, one.outputs[0])
                result = one.outputs[0]
                origins[result] = origin
            made.setdefault(key, result)


def _keeps_order(node: ir.Node) -> bool:
    """Whether the first result has the values of the first input, all of them, in their order."""
    if node.op_type in _ALWAYS:
        return True
    sizes = sizes_of(node.inputs[0])
    if sizes is None:
        return False
    if node.op_type == "Transpose":
        order = node.attributes.get_ints("perm", list(reversed(range(len(sizes)))))
        larger = [axis for axis in order if sizes[axis] != 1]
        return larger == sorted(larger)
    if node.op_type == "Gather":
        at = node.attributes.get_int("axis", 0)
        return size_of(node.inputs[0], at % len(sizes)) == 1 and numbers_of(node.inputs[1]) in ([0], [-1])
    if node.op_type == "Slice":
        steps = node.inputs[4] if len(node.inputs) > 4 else None
        forward = steps is None or set(numbers_of(steps) or (0,)) == {1}
        return forward and None not in sizes and sizes == sizes_of(node.outputs[0])
    return False


def _move(graph: ir.Graph, origin: ir.Value, given: list[Size], wanted: list[Size]) -> ir.Node | None:
    """The node that gives values other sizes; None where no node with constant numbers does."""
    for kind, more, fewer in (("Squeeze", given, wanted), ("Unsqueeze", wanted, given)):
        axes = _left_out(more, fewer)
        if axes:
            return ir.node(kind, [origin, numbers(graph, *axes)])
    shape = [size if isinstance(size, int) else -1 for size in wanted]
    return ir.node("Reshape", [origin, numbers(graph, *shape)]) if shape.count(-1) < 2 else None


def _left_out(more: list[Size], fewer: list[Size]) -> list[int]:
    """The axes of one without which the first sizes are the second; none where there are no such."""
    axes, rest = list[int](), list(fewer)
    for axis, size in enumerate(more):
        if rest and size == rest[0] and size is not None:
            del rest[0]
        elif size == 1:
            axes.append(axis)
        else:
            return []
    return [] if rest else axes
