"""What passes ask of values and of what makes them: sizes, constants, axes, and where slices begin and end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Size: TypeAlias = "int | str | None"
"""A number, a word where it is open, None where it is not known."""


class Block(NamedTuple):
    """The positions `start` … `end` - 1 along an axis."""

    axis: int
    start: int
    end: int


def sizes_of(value: ir.Value | None) -> tuple[Size, ...]:
    """The sizes of a value; () also where the number of its axes is not known."""
    if value is None or value.shape is None:
        return ()
    return tuple(size.value if isinstance(size, ir.SymbolicDim) else size for size in value.shape)


def size_of(value: ir.Value | None, axis: int) -> Size:
    """One size of a value; None for an axis that it does not have."""
    sizes = sizes_of(value)
    return sizes[axis] if 0 <= axis < len(sizes) else None


def size_along(value: ir.Value | None, axis: int) -> int | None:
    """How many positions a value has along an axis; None where that is not known or open."""
    size = size_of(value, axis)
    return size if isinstance(size, int) else None


def to_reshape(sizes: Sequence[Size]) -> list[int]:
    """Sizes as a Reshape takes them, -1 for each that is open."""
    return [size if isinstance(size, int) else -1 for size in sizes]


def alike(one: ir.Value, other: ir.Value, apart: Collection[int] = ()) -> bool:
    """Whether two values have the same sizes along all axes but some."""
    if one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        return False
    pairs = enumerate(zip(sizes_of(one), sizes_of(other), strict=True))
    return all(axis in apart or (a == b and a is not None) for axis, (a, b) in pairs)


def constant(value: ir.Value | None) -> NDArray[Any] | None:
    """The numbers of a value that no run changes; None for others."""
    tensor = None if value is None or value.is_graph_input() else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def numbers_of(value: ir.Value | None) -> list[int] | None:
    """The whole numbers of a constant of at most one axis; None where it is none."""
    found = constant(value)
    return (
        None if found is None or found.ndim > 1 or found.dtype not in (np.int64, np.int32) else found.ravel().tolist()
    )


def scalar_of(value: ir.Value | None) -> float | None:
    """The only number of a constant; None for everything else."""
    found = constant(value)
    return float(found.item()) if found is not None and found.size == 1 else None


def is_constant(value: ir.Value | None) -> bool:
    """Whether it depends on no input; a graph may be too deep for a function that calls itself."""
    known, left = set[ir.Value](), [value]
    while left:
        one = left.pop()
        if one is None or one.is_graph_input():
            return False
        if one.const_value is not None or one in known:
            continue
        known.add(one)
        node = one.producer()
        read = [] if node is None else [given for given in node.inputs if given is not None]
        if not read:
            return False
        left += read
    return True


def axis_of(node: ir.Node, value: ir.Value | None) -> int:
    """The axis that a node names, counted from the front of a value; -1 where that is not known."""
    return node.attributes.get_int("axis", 0) % (len(sizes_of(value)) or 1) if sizes_of(value) else -1


def order_of(node: ir.Node) -> list[int]:
    """The order into which a Transpose brings axes."""
    return list(node.attributes.get_ints("perm", range(len(sizes_of(node.inputs[0])))[::-1]))


def slices_of(node: ir.Node) -> dict[int, slice]:
    """What a Slice takes along which axes; {} where constants do not say it."""
    given = [numbers_of(one) for one in node.inputs[1:]]
    starts, ends, axes, steps = (*given, *(None,) * 4)[:4]
    rank = len(sizes_of(node.inputs[0]))
    if starts is None or ends is None or None in given or not rank:
        return {}
    axes, steps = axes or list(range(len(starts))), steps or [1] * len(starts)
    return {axis % rank: slice(*bounds) for axis, *bounds in zip(axes, starts, ends, steps, strict=True)}


def block_of(value: ir.Value) -> Block | None:
    """Which positions of a node's first input its result is, where a Slice or a Split made it, along one axis."""
    node = value.producer()
    if node is not None and node.op_type == "Slice" and len(taken := slices_of(node)) == 1:
        ((axis, which),) = taken.items()
        start, end, step = which.indices(size_along(node.inputs[0], axis) or 0)
        return Block(axis, start, end) if step == 1 and start < end else None
    if node is not None and node.op_type == "Split":
        axis, index = axis_of(node, value), value.index() or 0
        sizes = [size_along(output, axis) for output in node.outputs]
        known = [size for size in sizes if size is not None]
        if len(known) == len(sizes) and sum(known) == size_along(node.inputs[0], axis):
            return Block(axis, sum(known[:index]), sum(known[: index + 1]))
    return None
