"""Reads names, nested graphs and small constants of nodes in an ONNX graph."""

from __future__ import annotations

import onnx_ir as ir

FEW = 64
"""Maximum number of values in a constant that is read; for larger constants the shape is enough."""
RECURRENT = {"LSTM": 2, "GRU": 1, "RNN": 1}
"""Recurrent operators, each with its number of states. Inputs from number 5 on hold the initial states."""


def name_of(node: ir.Node) -> str:
    """Return a node's name; for a node without a name, the name of its first result."""
    return node.name or next((str(value.name) for value in node.outputs), "")


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """Return the graphs inside a node, e.g. the branches of an If."""
    return [each.as_graph() for each in node.attributes.values() if each.type == ir.AttributeType.GRAPH]


def numbers(value: ir.Value | None) -> list[int] | None:
    """Return a small constant of integers as a list; None for anything else."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size > FEW or not tensor.dtype.is_integer():
        return None
    return [int(number) for number in tensor.numpy().ravel()]
