"""Nodes of a foreign graph: their names, the graphs that they hold, small constants that they read."""

from __future__ import annotations

import onnx_ir as ir

FEW = 64
"""Numbers of a constant that are looked at: of a larger one its sizes are enough."""
RECURRENT = {"LSTM": 2, "GRU": 1, "RNN": 1}
"""Operators that carry states along a sequence, and how many, which start from their sixth input and the next one."""


def name_of(node: ir.Node) -> str:
    """A node's name, or its first result's."""
    return node.name or next((str(value.name) for value in node.outputs), "")


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """The graphs that a node holds, such as the branches of an If."""
    return [each.as_graph() for each in node.attributes.values() if each.type == ir.AttributeType.GRAPH]


def numbers(value: ir.Value | None) -> list[int] | None:
    """A small constant of whole numbers as a list; None for what is none."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size > FEW or not tensor.dtype.is_integer():
        return None
    return [int(number) for number in tensor.numpy().ravel()]
