"""What passes ask of values: sizes, constants, and who reads them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from txl_export.graphs.quantised_matmul import initializer

Size: TypeAlias = "int | str | None"
"""A number, a word where it is open, None where it is not known."""


def sizes_of(value: ir.Value | None) -> list[Size] | None:
    """The sizes of a value; None where the number of its axes is not known."""
    if value is None or value.shape is None:
        return None
    return [size.value if isinstance(size, ir.SymbolicDim) else size for size in value.shape]


def size_of(value: ir.Value | None, axis: int) -> Size:
    """One size of a value."""
    sizes = sizes_of(value) or []
    return sizes[axis] if axis < len(sizes) else None


def numbers_of(value: ir.Value | None) -> list[int] | None:
    """The whole numbers of a constant of at most one axis; None where it is none."""
    constant = None if value is None or value.is_graph_input() else value.const_value
    if constant is None or constant.dtype not in (ir.DataType.INT64, ir.DataType.INT32) or len(constant.shape) > 1:
        return None
    return [int(number) for number in constant.numpy().flat]


def numbers(graph: ir.Graph, *which: int) -> ir.Value:
    """The graph's constant of these numbers, int64."""
    return initializer(graph, f"numbers.{'.'.join(map(str, which))}", np.array(which, np.int64))


def number(graph: ir.Graph, which: int) -> ir.Value:
    """The graph's constant of this number, int32 without axes, as Gather takes one."""
    return initializer(graph, f"number.{which}", np.array(which, np.int32))


def give_way(old: ir.Value, new: ir.Value) -> None:
    """Let a value, which a node makes and which is no result of the graph, have the name and the place of another."""
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    new.type, new.shape = old.type, old.shape
    new.name, old.name = old.name, f"{old.name}.before"
