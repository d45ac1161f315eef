"""Adds operators and constants to a graph for passes, and replaces its values."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike, NDArray

from txl_export.graphs.passes.values import Size, size_along, to_reshape
from txl_export.graphs.quantised_matmul import initializer

_SPELT = 8
"""A constant of at most this number of values has them in its name; the name of a longer one has their hash."""


class Builder:
    """Adds operators before a node or at the graph's end, under unique names; equal constants are made only once.

    A new value has the dtype of its operator's first input, and a shape if it is known here.
    """

    def __init__(self, graph: ir.Graph, name: str) -> None:
        self._graph, self._name, self._count = graph, name, 0
        self._before: ir.Node | None = None

    def at(self, node: ir.Node) -> Self:
        """Add all following operators before this node; return the builder."""
        self._before = node
        return self

    def op(
        self, kind: str, inputs: Sequence[ir.Value | None], shape: ir.Shape | None = None, **attributes: Any
    ) -> ir.Value:
        """Add an operator of one result; return the result."""
        (result,) = self._ops(kind, inputs, [shape], attributes)
        return result

    def _ops(
        self, kind: str, inputs: Sequence[ir.Value | None], shapes: Sequence[ir.Shape | None], attributes: Any
    ) -> Sequence[ir.Value]:
        name = f"{self._before.name}.{self._name}.{self._count}" if self._before else f"{self._name}.{self._count}"
        self._count += 1
        node = ir.node(kind, inputs, attributes=attributes, num_outputs=len(shapes), name=name)
        for place, (output, shape) in enumerate(zip(node.outputs, shapes, strict=True)):
            output.name = f"{name}.{place}"
            output.type, output.shape = None if inputs[0] is None else inputs[0].type, shape
        if self._before is None:
            self._graph.append(node)
        else:
            self._graph.insert_before(self._before, node)
        return node.outputs

    def constant(self, numbers: NDArray[Any]) -> ir.Value:
        """Return a constant with an array's dtype and shape.

        For example, `constant(np.array([0, 2]))` is an int64 value [2].
        """
        sizes, long = "x".join(map(str, numbers.shape)) or "one", numbers.size > _SPELT
        label = hashlib.sha256(numbers.tobytes()).hexdigest()[:12] if long else ".".join(map(str, numbers.ravel()))
        return initializer(self._graph, f"{numbers.dtype}.{sizes}.{label}", numbers)

    def numbers(self, *which: int) -> ir.Value:
        """Return a constant int64 [n] of n numbers."""
        return self.constant(np.array(which, np.int64))

    def gather(self, value: ir.Value, places: ArrayLike, axis: int) -> ir.Value:
        """Select positions along an axis with a Gather; a single position (an integer) drops the axis.

        Of a value [2, 5, 8], `gather(value, [0, 3], 1)` is [2, 2, 8] and `gather(value, 3, 1)` is [2, 8].
        """
        which = np.asarray(places, np.int32)
        shape = None if value.shape is None else ir.Shape([*value.shape[:axis], *which.shape, *value.shape[axis + 1 :]])
        return self.op("Gather", [value, self.constant(which)], shape, axis=axis)

    def slice(self, value: ir.Value, axis: int, first: int, end: int) -> ir.Value:
        """Return the positions `first` … `end` - 1 of a value along an axis."""
        bounds = [self.numbers(one) for one in (first, end, axis)]
        return self.op("Slice", [value, *bounds], _with_size(value, axis, end - first))

    def split(self, value: ir.Value, sizes: Sequence[int], axis: int) -> Sequence[ir.Value]:
        """Split a value into parts of `sizes` along an axis, e.g. 5 into [2, 3]."""
        shapes = [_with_size(value, axis, size) for size in sizes]
        # A list of 128 sizes or more would be stored outside the graph, where shape inference cannot read it.
        if len(set(sizes)) == 1:
            return self._ops("Split", [value], shapes, {"axis": axis, "num_outputs": len(sizes)})
        return self._ops("Split", [value, self.numbers(*sizes)], shapes, {"axis": axis})

    def pieces(self, value: ir.Value, count: int, axis: int) -> Sequence[ir.Value]:
        """Split a value into `count` equal parts along an axis; the size of this axis may be open."""
        return self._ops("Split", [value], [None] * count, {"axis": axis, "num_outputs": count})

    def concat(self, parts: Sequence[ir.Value], axis: int) -> ir.Value:
        """Concatenate values along an axis; a single value is returned as it is."""
        if len(parts) == 1:
            return parts[0]
        sizes = [size_along(part, axis) for part in parts]
        known = [size for size in sizes if size is not None]
        shape = _with_size(parts[0], axis, sum(known)) if len(known) == len(sizes) else None
        return self.op("Concat", parts, shape, axis=axis)

    def reshape(self, value: ir.Value, sizes: Sequence[Size]) -> ir.Value:
        """Reshape a value to `sizes`, of which one may be open."""
        return self.op("Reshape", [value, self.numbers(*to_reshape(sizes))])

    def transpose(self, value: ir.Value, axes: Sequence[int]) -> ir.Value:
        """Transpose a value; return the value unchanged if the order of axes stays."""
        order = [int(axis) for axis in axes]
        if order == sorted(order):
            return value
        shape = None if value.shape is None else ir.Shape([value.shape[axis] for axis in order])
        return self.op("Transpose", [value], shape, perm=order)

    def scaled(self, value: ir.Value, factor: float) -> ir.Value:
        """Multiply a value by a number; return the value unchanged if the number is 1."""
        return value if factor == 1 else self.op("Mul", [value, self.constant(np.array(factor, np.float32))])

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Replace all uses of `old` by `new`; `old` may be an output of the graph."""
        if old.is_graph_output():
            if new.producer() is None or new.is_graph_output():
                new = self.op("Identity", [new])
            new.name, old.name = old.name, f"{old.name}.before"
            new.type, new.shape = old.type, old.shape
        new.type, new.shape = new.type or old.type, new.shape or old.shape
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def _with_size(value: ir.Value, axis: int, size: int) -> ir.Shape | None:
    if value.shape is None:
        return None
    return ir.Shape([size if place == axis else known for place, known in enumerate(value.shape)])
