"""Where the values that an operator reads come from in a product with a weight, whatever layout lies between.

Attention's queries, keys and values are products of rows with weights. Between such a product and the operator that
reads it, codes transpose, split, slice and reshape in many ways that only move values. So the numbers of the product's
elements are taken through all of that, and what comes out says which rows and which columns each axis runs over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.tape import Tape
from txl_runtime.bundle.open_batch import BATCH

from txl_export.graphs.quantised_matmul import initializer

OPEN = 2
"""Stands for a size that is open while numbers are moved: 1 would be an axis over which nothing changes."""
MOST = 2**23
"""Elements of a product whose numbers are moved."""
LEAST = 2**13
"""Multiplications that have to be saved: more operators take longer than fewer of them do."""

MOVING = frozenset({"Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators that only move values."""

Numbers = NDArray[np.int32]


@dataclass(frozen=True)
class Product:
    """Rows times a weight: rows [..., D] @ weight [D, N] + bias [N].

    Attributes:
        rows, weight, bias: the operands; the weight depends on no input.
        turned: whether the weight is there as [N, D].
        result: what it is before anything moves it.
    """

    rows: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    turned: bool
    result: ir.Value

    @property
    def width(self) -> int:
        """D."""
        return int(sizes(self.weight)[1 if self.turned else 0])

    @property
    def columns(self) -> int:
        """N."""
        return int(sizes(self.weight)[0 if self.turned else 1])


@dataclass(frozen=True)
class Axis:
    """An axis that runs over rows or columns of a product: its place in the view, its size, and the step of each."""

    place: int
    size: int
    step: int


@dataclass(frozen=True)
class View:
    """What an operator reads of a product.

    Attributes:
        product: of which.
        factor: that the values were multiplied by on the way.
        row_count: of the product.
        shape: of the view; axes of one element belong to neither rows nor columns.
        first_row, first_column: where rows and columns begin.
        rows, columns: the axes that run over each, the one of the largest step first.
    """

    product: Product
    factor: float
    row_count: int
    shape: tuple[int, ...]
    first_row: int
    first_column: int
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]


def sizes(value: ir.Value) -> tuple[Any, ...]:
    """Whole numbers, and words or None for what is open."""
    if value.shape is None:
        return (None,)
    return tuple(one if isinstance(one, int) else one.value for one in value.shape)


def is_open(value: ir.Value) -> bool:
    """Whether a size is not fixed."""
    return any(not isinstance(size, int) for size in sizes(value))


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


def scalar_of(value: ir.Value | None) -> float | None:
    """The only number of a constant; None for everything else."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return float(tensor.numpy().ravel()[0]) if tensor is not None and tensor.size == 1 else None


def view_of(value: ir.Value) -> View | None:
    """What a value shows of a product; None where it is none, or not in steps of one size along each axis."""
    found = _numbers(value)
    return None if found is None else _view(*found)


def views_of(value: ir.Value) -> Iterator[View]:
    """The same; where the first of three axes is one of sequences and heads, with that one taken as two."""
    found = _numbers(value)
    if found is None:
        return
    product, factor, numbers = found
    taken = [numbers]
    if numbers.ndim == 3:
        size = numbers.shape[0]
        taken += [numbers.reshape(-1, n, *numbers.shape[1:]) for n in range(2, size) if size % n == 0]
    for one in taken:
        if (view := _view(product, factor, one)) is not None:
            yield view


def _view(product: Product, factor: float, numbers: Numbers) -> View | None:
    if numbers.size == 0:
        return None
    row, column = np.divmod(numbers, product.columns)
    rows, columns = _steps(row), _steps(column)
    if rows is None or columns is None or {one.place for one in rows} & {one.place for one in columns}:
        return None
    count = int(np.prod(_shape(product.result))) // product.columns
    return View(product, factor, count, numbers.shape, int(row.flat[0]), int(column.flat[0]), rows, columns)


def _steps(numbers: Numbers) -> tuple[Axis, ...] | None:
    """The axes along which numbers grow, each by a step of its own; None where they do otherwise."""
    found, known = [], np.array(numbers.flat[0], np.int64)
    for place, size in enumerate(numbers.shape):
        step = 0 if size == 1 else int(numbers.take(1, place).flat[0]) - int(numbers.flat[0])
        if step:
            found.append(Axis(place, size, step))
        known = known[..., None] + np.arange(size) * step
    if any(one.step < 0 for one in found) or not np.array_equal(known, numbers):
        return None
    return tuple(sorted(found, key=lambda one: -one.step))


def _numbers(value: ir.Value) -> tuple[Product, float, Numbers] | None:
    """A product, what its values are multiplied by, and the number of its element at each place of a value."""
    if (product := product_of(value)) is not None:
        shape = _shape(value)
        if -1 in shape or np.prod(shape) > MOST:
            return None
        return product, 1.0, np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    node = value.producer()
    if node is None or not node.inputs or node.inputs[0] is None:
        return None
    if node.op_type in ("Mul", "Div"):
        places = (0, 1) if node.op_type == "Mul" else (0,)
        for place in places:
            by, of = scalar_of(node.inputs[1 - place]), node.inputs[place]
            if by and of is not None and of.shape is not None and value.shape is not None:
                found = _numbers(of) if len(of.shape) == len(value.shape) else None
                if found is not None:
                    return found[0], found[1] * (by if node.op_type == "Mul" else 1 / by), found[2]
        return None
    if node.op_type not in MOVING:
        return None
    found = _numbers(node.inputs[0])
    if found is None:
        return None
    moved = _moved(node, value, found[2])
    return None if moved is None else (found[0], found[1], moved)


def _moved(node: ir.Node, value: ir.Value, numbers: Numbers) -> Numbers | None:
    """Numbers after an operator that only moves."""
    if node.op_type == "Transpose":
        axes = node.attributes.get_ints("perm", list(range(numbers.ndim))[::-1])
        return numbers.transpose(axes)
    if node.op_type == "Split":
        axis = node.attributes.get_int("axis", 0)
        lengths = [sizes(output)[axis] for output in node.outputs]
        if not all(isinstance(one, int) for one in lengths):
            return None
        index = next(index for index, one in enumerate(node.outputs) if one is value)
        first = sum(lengths[:index])
        return numbers.take(np.arange(first, first + lengths[index]), axis)
    if node.op_type == "Slice":
        given = [None if one is None else ir.convenience.get_const_tensor(one) for one in node.inputs[1:]]
        if any(one is None for one in given) or len(given) < 2:
            return None
        starts, ends, *rest = [[int(n) for n in one.numpy().ravel()] for one in given if one is not None]
        axes = rest[0] if rest else range(len(starts))
        steps = rest[1] if len(rest) > 1 else [1] * len(starts)
        for first, end, axis, step in zip(starts, ends, axes, steps, strict=True):
            if step < 1:
                return None
            which: list[slice] = [slice(None)] * numbers.ndim
            which[axis] = slice(first, end, step)
            numbers = numbers[tuple(which)]
        return numbers
    shape = _shape(value)
    known = int(np.prod([size for size in shape if size > 0]))
    if shape.count(-1) > 1 or (numbers.size % known if -1 in shape else numbers.size != known):
        return None
    return numbers.reshape(shape)


def product_of(value: ir.Value) -> Product | None:
    """The product that a value is the result of; None where it is none with a weight."""
    node = value.producer()
    if node is None:
        return None
    if node.op_type == "Add":
        for place in (0, 1):
            bias, of = node.inputs[1 - place], node.inputs[place]
            if of is None or bias is None or len(sizes(bias)) != 1:
                continue
            found = product_of(of)
            if found is not None and found.bias is None and sizes(bias) == (found.columns,) and is_constant(bias):
                return replace(found, bias=bias, result=value)
        return None
    turned = False
    if node.op_type == "Gemm":
        turned = bool(node.attributes.get_int("transB", 0))
        scales = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
        if node.attributes.get_int("transA", 0) or scales != [1.0, 1.0]:
            return None
    elif node.op_type != "MatMul":
        return None
    rows, weight, bias = (*node.inputs, None)[:3]
    if rows is None or weight is None or len(sizes(rows)) < 2 or is_constant(rows) or not is_constant(weight):
        return None
    if len(sizes(weight)) != 2 or is_open(weight):
        return None
    found = Product(rows, weight, bias, turned, value)
    return found if bias is None or (is_constant(bias) and sizes(bias) == (found.columns,)) else None


def _shape(value: ir.Value) -> tuple[int, ...]:
    """The shape, with a number for how many sequences there are, and -1 for what is not known."""
    return tuple(size if isinstance(size, int) else OPEN if size == BATCH else -1 for size in sizes(value))


class Builder:
    """Makes operators with names, types and shapes of their own in front of a node.

    Args:
        graph: to put them into.
        before: what reads them.
    """

    def __init__(self, graph: ir.Graph, before: ir.Node) -> None:
        self._graph, self._before, self._tape = graph, before, Tape()

    def op(self, kind: str, inputs: Sequence[ir.Value | None], **attributes: Any) -> ir.Value:
        """One operator's result."""
        made: ir.Value = self._tape.op(kind, inputs, attributes)
        return made

    def whole(self, numbers: Sequence[int]) -> ir.Value:
        """A constant of int64."""
        name = f"whole.{'.'.join(map(str, numbers))}"
        return initializer(self._graph, name, np.array(numbers, np.int64))

    def reshape(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        """A value in another shape, -1 for one open size."""
        return self.op("Reshape", [value, self.whole(shape)])

    def slice(self, value: ir.Value, axis: int, first: int, end: int) -> ir.Value:
        """Some of a value's elements along an axis."""
        return self.op("Slice", [value, *(self.whole([one]) for one in (first, end, axis))])

    def transpose(self, value: ir.Value, axes: Sequence[int]) -> ir.Value:
        """A value with its axes in another order; itself where that is the one it has."""
        return value if list(axes) == sorted(axes) else self.op("Transpose", [value], perm=[int(axis) for axis in axes])

    def scaled(self, value: ir.Value, factor: float) -> ir.Value:
        """A value times a number."""
        if factor == 1:
            return value
        number = initializer(self._graph, f"factor.{factor!r}", np.array(factor, np.float32))
        return self.op("Mul", [value, number])

    def columns_of(self, view: View) -> tuple[ir.Value, ir.Value | None]:
        """The weight's columns that a view shows, as [C, D], and the bias of these; the axis of the largest step first.

        They are operators over constants, so that the weight is stored once; engines compute them when they load.
        """
        product, axes = view.product, view.columns
        weight = product.weight if product.turned else self.transpose(product.weight, (1, 0))
        which = np.array([view.first_column])
        for one in axes:
            which = (which[:, None] + np.arange(one.size) * one.step).ravel()
        return self._taken(weight, which, product.columns), None if product.bias is None else self._taken(
            product.bias, which, product.columns
        )

    def _taken(self, constant: ir.Value, which: NDArray[np.int64], columns: int) -> ir.Value:
        first, end = int(which[0]), int(which[-1]) + 1
        if end - first > len(which):
            name = f"columns.{hashlib.sha256(which.tobytes()).hexdigest()[:12]}"
            return self.op("Gather", [constant, initializer(self._graph, name, which.astype(np.int32))], axis=0)
        if len(which) == columns:
            return constant
        return self.slice(constant, 0, first, end)

    def replace(self, old: ir.Value, made: ir.Value, kind: str) -> None:
        """Put what was made in front of the node, and let all that reads a value read another one."""
        made.type, made.shape, name = old.type, old.shape, old.name
        old.name, made.name = f"{name}.before", name
        for number, node in enumerate(self._tape.nodes):
            node.name = f"{name}.{kind}.{number}"  # one operator may have several values
            for output in node.outputs:
                output.name = output.name or node.name
        self._graph.insert_before(self._before, self._tape.nodes)
        ir.convenience.replace_all_uses_with(old, made, replace_graph_outputs=True)
