"""Tells passes the sizes, constants, axes and bounds of slices of values and nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Size: TypeAlias = "int | str | None"
"""The size of an axis: a number, a word if it is open, None if it is unknown."""


class Block(NamedTuple):
    """A range of a value: its positions `start` … `end` - 1 along an axis."""

    axis: int
    start: int
    end: int


def sizes_of(value: ir.Value | None) -> tuple[Size, ...]:
    """Return the sizes of a value; () also if the number of axes is unknown."""
    if value is None or value.shape is None:
        return ()
    return tuple(size.value if isinstance(size, ir.SymbolicDim) else size for size in value.shape)


def size_of(value: ir.Value | None, axis: int) -> Size:
    """Return one size of a value; None if the value lacks this axis."""
    sizes = sizes_of(value)
    return sizes[axis] if 0 <= axis < len(sizes) else None


def size_along(value: ir.Value | None, axis: int) -> int | None:
    """Return the size of a value along an axis; None if it is unknown or open."""
    size = size_of(value, axis)
    return size if isinstance(size, int) else None


def to_reshape(sizes: Sequence[Size]) -> list[int]:
    """Return sizes as a Reshape takes them: -1 stands for a size that is open or unknown."""
    return [size if isinstance(size, int) else -1 for size in sizes]


def alike(one: ir.Value, other: ir.Value, apart: Collection[int] = ()) -> bool:
    """Return whether two values have equal, known sizes along all axes except those in `apart`."""
    if one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        return False
    pairs = enumerate(zip(sizes_of(one), sizes_of(other), strict=True))
    return all(axis in apart or (a == b and a is not None) for axis, (a, b) in pairs)


def constant(value: ir.Value | None) -> NDArray[Any] | None:
    """Return the array of a value that is the same in every run; None for other values.

    For example, the initializer int64 [3] that a Reshape reads.
    """
    tensor = None if value is None or value.is_graph_input() else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def numbers_of(value: ir.Value | None) -> list[int] | None:
    """Return the integers of a constant with at most one axis; None for any other value."""
    array = constant(value)
    return (
        None if array is None or array.ndim > 1 or array.dtype not in (np.int64, np.int32) else array.ravel().tolist()
    )


def scalar_of(value: ir.Value | None) -> float | None:
    """Return the number of a constant with one element; None for any other value."""
    array = constant(value)
    return float(array.item()) if array is not None and array.size == 1 else None


def is_constant(value: ir.Value | None) -> bool:
    """Return whether a value depends only on constants; a loop, because some graphs are too deep for recursion."""
    known, left = set[ir.Value](), [value]
    while left:
        one = left.pop()
        if one is None or one.is_graph_input():
            return False
        if one.const_value is not None or one in known:
            continue
        known.add(one)
        node = one.producer()
        read = [] if node is None else [entry for entry in node.inputs if entry is not None]
        if not read:
            return False
        left += read
    return True


def axis_of(node: ir.Node, value: ir.Value | None) -> int:
    """Return the axis that a node names, counted from the front of a value; -1 if the value's axes are unknown."""
    return node.attributes.get_int("axis", 0) % (len(sizes_of(value)) or 1) if sizes_of(value) else -1


def order_of(node: ir.Node) -> list[int]:
    """Return the permutation of a Transpose."""
    return list(node.attributes.get_ints("perm", range(len(sizes_of(node.inputs[0])))[::-1]))


def slices_of(node: ir.Node) -> dict[int, slice]:
    """Return the ranges that a Slice takes, by axis, e.g. {1: slice(0, 8, 1)}; {} if a bound is no constant."""
    operands = [numbers_of(one) for one in node.inputs[1:]]
    starts, ends, axes, steps = (*operands, *(None,) * 4)[:4]
    rank = len(sizes_of(node.inputs[0]))
    if starts is None or ends is None or None in operands or not rank:
        return {}
    axes, steps = axes or list(range(len(starts))), steps or [1] * len(starts)
    return {axis % rank: slice(*bounds) for axis, *bounds in zip(axes, starts, ends, steps, strict=True)}


def block_of(value: ir.Value) -> Block | None:
    """Return the range of an input that a value is, if a Slice or Split along one axis made the value; else None.

    E.g. Block(1, 0, 8) for the first half of a Split of [B, 16].
    """
    node = value.producer()
    if node is not None and node.op_type == "Slice" and len(slices := slices_of(node)) == 1:
        ((axis, which),) = slices.items()
        start, end, step = which.indices(size_along(node.inputs[0], axis) or 0)
        return Block(axis, start, end) if step == 1 and start < end else None
    if node is not None and node.op_type == "Split":
        axis, index = axis_of(node, value), value.index() or 0
        sizes = [size_along(output, axis) for output in node.outputs]
        known = [size for size in sizes if size is not None]
        if len(known) == len(sizes) and sum(known) == size_along(node.inputs[0], axis):
            return Block(axis, sum(known[:index]), sum(known[: index + 1]))
    return None
