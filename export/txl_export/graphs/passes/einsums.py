"""An Einsum of two operands as a product of matrices, which engines compute faster, and which other passes read."""

from __future__ import annotations

import onnx_ir as ir

from txl_export.graphs.passes.views import Builder, sizes


def einsums_to_products(graph: ir.Graph) -> None:
    """Replace those that sum over one axis and have at most one axis more of either operand alone."""
    for node in list(graph):
        if node.op_type == "Einsum" and len(node.inputs) == 2:
            _replace(graph, node, node.attributes.get_string("equation", "").replace(" ", ""))


def _replace(graph: ir.Graph, node: ir.Node, equation: str) -> None:
    given, _, result = equation.partition("->")
    one, other = given.split(",")
    left, right = node.inputs
    if not result or "." in equation or left is None or right is None:
        return
    if any(len(set(term)) < len(term) for term in (one, other, result)):
        return
    both = [letter for letter in result if letter in one and letter in other]
    mine = [letter for letter in one if letter not in other]
    theirs = [letter for letter in other if letter not in one]
    summed = [letter for letter in one if letter in other and letter not in result]
    if len(summed) != 1 or len(mine) > 1 or len(theirs) > 1 or set(mine + theirs) - set(result):
        return
    if any(sizes(left)[one.index(letter)] != sizes(right)[other.index(letter)] for letter in both + summed):
        return  # a size of 1 that is repeated
    build = Builder(graph, node)
    left = build.transpose(left, [one.index(letter) for letter in both + mine + summed])
    right = build.transpose(right, [other.index(letter) for letter in both + summed + theirs])
    if not mine:
        left = build.op("Unsqueeze", [left, build.whole([-2])])
    if not theirs:
        right = build.op("Unsqueeze", [right, build.whole([-1])])
    made = build.op("MatMul", [left, right])
    added = [axis for axis, letters in ((-2, mine), (-1, theirs)) if not letters]
    if added:
        made = build.op("Squeeze", [made, build.whole(added)])
    order = both + mine + theirs
    made = build.transpose(made, [order.index(letter) for letter in result])
    build.replace(node.outputs[0], made, "product")
