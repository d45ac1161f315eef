"""Rewrites an Einsum of two operands as a MatMul, which engines compute faster and which other passes recognise."""

from __future__ import annotations

import onnx_ir as ir

from txl_export.graphs.passes.builder import Builder
from txl_export.graphs.passes.values import size_of


def einsums_to_products(graph: ir.Graph) -> None:
    """Replace Einsums by matrix products: those that sum over one axis, and in which each operand has at most one axis
    that the other operand lacks.
    """
    build = Builder(graph, "product")
    for node in list(graph):
        if node.op_type == "Einsum" and len(node.inputs) == 2:
            _replace(build.at(node), node, node.attributes.get_string("equation", "").replace(" ", ""))


def _replace(build: Builder, node: ir.Node, equation: str) -> None:
    terms, _, result = equation.partition("->")
    one, other = terms.split(",")
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
    if any(size_of(left, one.index(letter)) != size_of(right, other.index(letter)) for letter in both + summed):
        return  # one operand has size 1 along an axis and is broadcast
    left = build.transpose(left, [one.index(letter) for letter in both + mine + summed])
    right = build.transpose(right, [other.index(letter) for letter in both + summed + theirs])
    if not mine:
        left = build.op("Unsqueeze", [left, build.numbers(-2)])
    if not theirs:
        right = build.op("Unsqueeze", [right, build.numbers(-1)])
    product = build.op("MatMul", [left, right])
    added = [axis for axis, letters in ((-2, mine), (-1, theirs)) if not letters]
    if added:
        product = build.op("Squeeze", [product, build.numbers(*added)])
    order = both + mine + theirs
    build.replace(node.outputs[0], build.transpose(product, [order.index(letter) for letter in result]))
