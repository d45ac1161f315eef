"""Makes a graph take any number of sequences, by comparing its captures with B and with B + 1 sequences.

The captures differ in what follows from B: sizes in shapes, and constants with an entry for every sequence. The graph
is changed to compute these sizes and entries from the number of sequences in its inputs. If anything else differs, B
stays fixed. Two captures do not prove that the opened graph is right for every number; the caller tests it.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from txl_runtime.bundle.open_batch import BATCH, OPENED

from txl_export.graphs.quantised_matmul import initializer

_Sizes: TypeAlias = "list[int | str | None]"
_WHOLE = (ir.DataType.INT64, ir.DataType.INT32)
_SIZES = {"ConstantOfShape": {0}, "Expand": {1}, "Range": {1}, "Reshape": {1}, "Slice": {1, 2}, "Tile": {1}}
"""The places of the inputs that set the size of the result, by operator. A number that changes with B in any other
place enters the computation, so a result might depend on the number of sequences, for values that no test tries."""


class FixedBatchError(Exception):
    """The graph works for only one batch size; the message names the node."""


def open_batch(model: ir.Model, other: ir.Model, size: int) -> None:
    """Make a graph take any number of sequences, in place. After an error the graph is unusable.

    Args:
        model: a settled graph of `size` sequences.
        other: the same graph for `size` + 1 sequences.

    Raises:
        FixedBatchError: something other than a size or the entries of a constant changes with B.
    """
    _Opening(model.graph, other.graph, size).run()


class _Opening:
    def __init__(self, graph: ir.Graph, other: ir.Graph, size: int) -> None:
        self._graph, self._size = graph, size
        self._nodes, self._others = list(graph), list(other)
        self._ends = list(zip(graph.inputs, other.inputs, strict=True))
        self._names, self._places = Counter[str | None](), dict[str, str]()
        self._values: dict[tuple[object, ...], ir.Value] = {}
        self._front: list[ir.Node] = []

    def run(self) -> None:
        """Compare the two graphs node by node, and change the graph of B sequences."""
        if len(self._nodes) != len(self._others):
            raise FixedBatchError(f"the graph of {self._size + 1} sequences has more operators or fewer")
        sizes = {id(one): self._sizes(one, two) for one, two in self._ends}
        mates = {id(one): two for one, two in self._ends}
        for node, twin in zip(self._nodes, self._others, strict=True):
            _check_alike(node, twin)
            first = sizes.get(id(node.inputs[0]), []) if node.inputs else []
            for index, (one, two) in enumerate(zip(node.inputs, twin.inputs, strict=True)):
                if one is None or two is None or not (one.is_initializer() and two.is_initializer()):
                    if (None if one is None else mates.get(id(one))) is not two:
                        raise FixedBatchError(f"{node.op_type} reads something else")
                elif (changed := self._opened(node, index, first, one, two)) is not one:
                    node.replace_input_with(index, changed)
            # a Squeeze without axes would also drop the axis of a single sequence
            if node.op_type == "Squeeze" and len(node.inputs) == 1 and None not in first:
                node.resize_inputs(2)
                node.replace_input_with(1, self._numbers(*(axis for axis, size in enumerate(first) if size == 1)))
            for one, two in zip(node.outputs, twin.outputs, strict=True):
                mates[id(one)], sizes[id(one)] = two, self._sizes(one, two)
        for value in (*self._graph.inputs, *(output for node in self._nodes for output in node.outputs)):
            if value.shape is not None:
                value.shape = ir.Shape(sizes[id(value)])
        for node in reversed(self._front):
            self._graph.insert_before(self._graph[0], node)
        self._order_constants()

    def _order_constants(self) -> None:
        """Remove constants that no node reads; a constant that replaces an older one takes the older one's place."""
        constants = self._graph.initializers
        places = {name: place for place, name in enumerate(constants)}
        constants_in_use = [value for value in constants.values() if value.uses()]
        constants_in_use.sort(key=lambda value: places[self._places.get(str(value.name), str(value.name))])
        constants.clear()
        for value in constants_in_use:
            self._graph.register_initializer(value)

    def _sizes(self, one: ir.Value, two: ir.Value) -> _Sizes:
        """Return the sizes of a value: `BATCH` for the number of sequences, None for an unknown size."""
        if one.shape is None or two.shape is None or len(one.shape) != len(two.shape):
            return [None] * len(one.shape or ())
        return [
            first if first == second and isinstance(first, int) else BATCH if self._is_batch(first, second) else None
            for first, second in zip(one.shape.dims, two.shape.dims, strict=True)
        ]

    def _is_batch(self, first: object, second: object) -> bool:
        return (first, second) == (self._size, self._size + 1)

    def _opened(self, node: ir.Node, index: int, first: _Sizes, value: ir.Value, twin: ir.Value) -> ir.Value:
        """Return the value that a node reads in place of a constant: the constant itself if it is the same for B + 1.

        Args:
            node: the node that reads the constant.
            index: the place of the constant among the node's inputs.
            first: the sizes of the node's first input.
            value, twin: the constant in the graph for B sequences, and in the graph for B + 1.

        Raises:
            FixedBatchError: the constant changes with B in a way that no operator here expresses.
        """
        assert value.const_value is not None
        assert twin.const_value is not None
        one, two = value.const_value.numpy(), twin.const_value.numpy()
        if _same(one, two):
            return value
        if one.shape != two.shape:
            return self._entries(node, value, one, two)
        sizes = value.dtype in _WHOLE and one.ndim < 2 and index in _SIZES.get(node.op_type, ())
        times = self._multiples(one, two) if sizes else None
        if times is None:
            raise FixedBatchError(f"{node.op_type} computes with a number that changes with B")
        target = _target(node, first, one, times) if index == 1 else None
        if target is not None:
            if 0 in target and node.attributes.get_int("allowzero"):  # with allowzero, 0 would be a size
                del node.attributes["allowzero"]
            return self._written(value, target)
        return self._computed(value, one, times)

    def _multiples(self, one: NDArray[Any], two: NDArray[Any]) -> NDArray[Any] | None:
        """Return n for each number that is n · B, 0 for a number that B + 1 does not change; None if any is neither.

        For B = 4: [3, 0] of [12, 64], which is [15, 64] for B = 5.
        """
        times: NDArray[Any] = two - one
        return times if np.array_equal(one[times != 0], (self._size * times)[times != 0]) else None

    def _entries(self, node: ir.Node, value: ir.Value, one: NDArray[Any], two: NDArray[Any]) -> ir.Value:
        """Return a Slice of a constant that has entries for each sequence: the entries of the sequences there are."""
        axes = [axis for axis, sizes in enumerate(zip(one.shape, two.shape, strict=False)) if sizes[0] != sizes[1]]
        if one.ndim == two.ndim and len(axes) == 1:
            (axis,) = axes
            count = one.shape[axis]
            times = two.shape[axis] - count
            if count == times * self._size and _same(one, np.take(two, np.arange(count), axis)):
                if (value.name, axis) not in self._values:
                    ends = self._count(times)
                    inputs = [value, self._numbers(0), ends, self._numbers(axis)]
                    sizes: _Sizes = [*one.shape]
                    sizes[axis] = BATCH if times == 1 else None
                    self._values[value.name, axis] = self._add("Slice", inputs, value.dtype, sizes, self._name(value))
                return self._values[value.name, axis]
        raise FixedBatchError(
            f"{node.op_type} reads a constant that changes with B in another way than by entries at its end"
        )

    def _written(self, value: ir.Value, target: NDArray[Any]) -> ir.Value:
        """Return a constant `target` that replaces `value`; equal replacements are one constant."""
        key = (value.name, target.tobytes())
        if key not in self._values:
            value_of_size = self._values[key] = initializer(self._graph, self._name(value), target)
            self._places[str(value_of_size.name)] = str(value.name)
        return self._values[key]

    def _name(self, value: ir.Value) -> str:
        """Return a new name for a replacement of a constant; a constant may have several replacements."""
        number = self._names[value.name] = self._names[value.name] + 1
        return f"{value.name}{OPENED}{number if number > 1 else ''}"

    def _computed(self, value: ir.Value, numbers: NDArray[Any], times: NDArray[Any]) -> ir.Value:
        """Return a value, computed in the graph, for a constant in which some numbers are multiples of B."""
        key = (value.name, *times.flat)
        if key not in self._values:
            parts = list[ir.Value]()
            for of_batch, group in groupby(zip(numbers.flat, times.flat, strict=True), lambda pair: int(pair[1])):
                fixed = [int(number) for number, _ in group]
                parts += [self._count(of_batch)] * len(fixed) if of_batch else [self._numbers(*fixed)]
            result, whole, name = parts[0], ir.DataType.INT64, self._name(value)
            if len(parts) > 1:
                result = self._add("Concat", parts, whole, [numbers.size], f"{name}.numbers", axis=0)
            if numbers.ndim == 0:
                result = self._add("Squeeze", [result, self._numbers(0)], whole, [], f"{name}.number")
            self._values[key] = self._add("Cast", [result], value.dtype, [*numbers.shape], name, to=value.dtype)
        return self._values[key]

    def _count(self, times: int) -> ir.Value:
        """Return `times` · B as a value of the graph, int64 [1]."""
        name, key, whole = f"{BATCH}.{times}", (times,), ir.DataType.INT64
        if key not in self._values:
            if times == 1:
                source, axis = next(
                    (one, sizes.index(BATCH)) for one, two in self._ends if BATCH in (sizes := self._sizes(one, two))
                )
                self._values[key] = self._add("Shape", [source], whole, [1], name, start=axis, end=axis + 1)
            else:
                self._values[key] = self._add("Mul", [self._count(1), self._numbers(times)], whole, [1], name)
        return self._values[key]

    def _numbers(self, *numbers: int) -> ir.Value:
        return initializer(self._graph, f"{BATCH}.is.{'.'.join(map(str, numbers))}", np.array(numbers, np.int64))

    def _add(
        self, op: str, inputs: list[ir.Value], dtype: ir.DataType | None, sizes: _Sizes, name: str, **attributes: Any
    ) -> ir.Value:
        """Add a node that will stand before all existing nodes; return its result."""
        node = ir.node(op, inputs, attributes=attributes, name=f"{op}.{name}")
        result = node.outputs[0]
        result.name, result.shape = name, ir.Shape(sizes)
        result.type = None if dtype is None else ir.TensorType(dtype)
        self._front.append(node)
        return result


def _target(node: ir.Node, first: _Sizes, numbers: NDArray[Any], times: NDArray[Any]) -> NDArray[Any] | None:
    """Return a node's target shape with 0, 1 or -1 for B: [0, 8, 64] for [B, 8, 64]; None if no such number fits.

    A Reshape keeps the input's size where its shape has 0, and computes the size where its shape has -1; an Expand
    keeps the size where its shape has 1. No size of the result may be 0.
    """
    shape, result = numbers.copy(), node.outputs[0].shape
    if node.op_type not in ("Reshape", "Expand") or result is None or 0 in result.dims:
        return None
    if 0 in numbers and node.attributes.get_int("allowzero"):
        return None
    for axis in np.flatnonzero(times).tolist():
        at = axis if node.op_type == "Reshape" else axis + len(first) - len(shape)
        if times[axis] == 1 and 0 <= at < len(first) and first[at] == BATCH:
            shape[axis] = 0 if node.op_type == "Reshape" else 1
        elif node.op_type == "Reshape" and -1 not in shape:
            shape[axis] = -1
        else:
            return None
    return shape


def _check_alike(node: ir.Node, twin: ir.Node) -> None:
    """Raise FixedBatchError unless two nodes have the same operator and attributes."""
    one, two = ((part.domain, part.op_type, len(part.inputs), len(part.outputs)) for part in (node, twin))
    if one != two or {*node.attributes} != {*twin.attributes}:
        raise FixedBatchError(f"{node.op_type} is another operator")
    for name, attribute in node.attributes.items():
        mine, other = attribute.value, twin.attributes[name].value
        tensors = isinstance(mine, ir.TensorProtocol) and isinstance(other, ir.TensorProtocol)
        if not (_same(mine.numpy(), other.numpy()) if tensors else mine == other):
            raise FixedBatchError(f"{node.op_type} has another {name}")


def _same(one: NDArray[Any], two: NDArray[Any]) -> bool:
    """Return whether two constants are equal to the bit; large ones often share memory, which is tested first."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    apart = one.__array_interface__["data"] != two.__array_interface__["data"]
    return not apart or one.tobytes() == two.tobytes()
