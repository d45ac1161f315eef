"""Traces a value back to a product of rows with a weight, through operators that change only the layout.

Attention's queries, keys and values are such products. Models transpose, split, slice and reshape them in many ways
before an operator reads them. Here the elements of the product are numbered, and the numbers go through the same
operators. The numbers that arrive show which rows and columns of the product each axis of the value runs over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from txl_runtime.bundle.open_batch import BATCH

from txl_export.graphs.passes.builder import Builder
from txl_export.graphs.passes.values import (
    block_of,
    is_constant,
    order_of,
    scalar_of,
    size_along,
    sizes_of,
    slices_of,
)

OPEN = 2
"""Number of sequences assumed for an open batch: 2, because along an axis of size 1 the numbers show no step."""
MOST = 2**23
"""Maximum number of elements of a product that are numbered; it limits memory and time."""
LEAST = 2**13
"""Least number of multiplications that a replacement must save; if it saves fewer, its own operators cost more."""

MOVING = frozenset({"Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators that only move values, which the numbers can follow."""

Numbers = NDArray[np.int32]


@dataclass(frozen=True)
class Product:
    """Rows times a weight: rows [..., D] @ weight [D, N] + bias [N].

    Attributes:
        rows, weight, bias: the operands; weight and bias depend on no input of the graph.
        turned: True if the weight is stored as [N, D].
        result: the value of the product, before any operator moves it.
    """

    rows: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    turned: bool
    result: ir.Value

    @property
    def width(self) -> int:
        """The number of inputs, D."""
        return size_along(self.weight, 1 if self.turned else 0) or 0

    @property
    def columns(self) -> int:
        """The number of outputs, N."""
        return size_along(self.weight, 0 if self.turned else 1) or 0


@dataclass(frozen=True)
class Axis:
    """An axis of a view that runs over a product's rows or columns: its place, its size, and the step of its index."""

    place: int
    size: int
    step: int


@dataclass(frozen=True)
class View:
    """The part of a product that a value shows, and its layout in that value.

    E.g. shape [4, 2, 8]: `rows` has the axis of size 4; `columns` has the axis of 2 heads, with step 8, and the axis of
    size 8, with step 1.

    Attributes:
        product: the product that is read.
        factor: the number by which the product's values were multiplied on the way to this value.
        row_count: the number of the product's rows.
        shape: the shape of the view; axes of size 1 belong to neither rows nor columns.
        first_row, first_column: the row and the column of the view's first element.
        rows, columns: the view's axes that run over rows and over columns, largest step first.
    """

    product: Product
    factor: float
    row_count: int
    shape: tuple[int, ...]
    first_row: int
    first_column: int
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]


def view_of(value: ir.Value) -> View | None:
    """Return the view of a product that a value shows; None if it shows none, or an axis has no constant step."""
    numbers = _numbers(value)
    return None if numbers is None else _view(*numbers)


def views_of(value: ir.Value) -> Iterator[View]:
    """Yield the view that `view_of` finds; a value [6, L, d] is also viewed as [2, 3, L, d] and as [3, 2, L, d]."""
    numbers_of_view = _numbers(value)
    if numbers_of_view is None:
        return
    product, factor, numbers = numbers_of_view
    views = [numbers]
    if numbers.ndim == 3:
        size = numbers.shape[0]
        views += [numbers.reshape(-1, n, *numbers.shape[1:]) for n in range(2, size) if size % n == 0]
    for one in views:
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
    """Return the axes along which numbers grow, each with its constant step; None if a step varies or is negative."""
    steps, known = [], np.array(numbers.flat[0], np.int64)
    for place, size in enumerate(numbers.shape):
        step = 0 if size == 1 else int(numbers.take(1, place).flat[0]) - int(numbers.flat[0])
        if step:
            steps.append(Axis(place, size, step))
        known = known[..., None] + np.arange(size) * step
    if any(one.step < 0 for one in steps) or not np.array_equal(known, numbers):
        return None
    return tuple(sorted(steps, key=lambda one: -one.step))


def _numbers(value: ir.Value) -> tuple[Product, float, Numbers] | None:
    """Return the product behind a value, the factor on it, and the product's element number at each place; or None."""
    if (product := product_of(value)) is not None:
        shape = _shape(value)
        if -1 in shape or np.prod(shape) > MOST:
            return None
        return product, 1.0, np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    node = value.producer()
    if node is None or not node.inputs or node.inputs[0] is None:
        return None
    if node.op_type in ("Mul", "Div"):
        for place in (0, 1) if node.op_type == "Mul" else (0,):
            by, of = scalar_of(node.inputs[1 - place]), node.inputs[place]
            if by and of is not None and len(sizes_of(of)) == len(sizes_of(value)) and (base := _numbers(of)):
                return base[0], base[1] * (by if node.op_type == "Mul" else 1 / by), base[2]
        return None
    if node.op_type not in MOVING:
        return None
    base = _numbers(node.inputs[0])
    if base is None:
        return None
    moved = _moved(node, value, base[2])
    return None if moved is None else (base[0], base[1], moved)


def _moved(node: ir.Node, value: ir.Value, numbers: Numbers) -> Numbers | None:
    """Return the numbers after an operator that only moves values; None if the operator cannot be followed."""
    if node.op_type == "Transpose":
        return numbers.transpose(order_of(node))
    if node.op_type == "Split":
        block = block_of(value)
        return None if block is None else numbers.take(np.arange(block.start, block.end), block.axis)
    if node.op_type == "Slice":
        slices = slices_of(node)
        if not slices or any(one.step < 1 for one in slices.values()):
            return None
        return numbers[tuple(slices.get(axis, slice(None)) for axis in range(numbers.ndim))]
    shape = _shape(value)
    known = int(np.prod([size for size in shape if size > 0]))
    if shape.count(-1) > 1 or (numbers.size % known if -1 in shape else numbers.size != known):
        return None
    return numbers.reshape(shape)


def product_of(value: ir.Value) -> Product | None:
    """Return the product with a weight that makes a value; None if no such product makes it."""
    node = value.producer()
    if node is None:
        return None
    if node.op_type == "Add":
        for place in (0, 1):
            bias, of = node.inputs[1 - place], node.inputs[place]
            if of is None or bias is None or len(sizes_of(bias)) != 1:
                continue
            product = product_of(of)
            if (
                product is not None
                and product.bias is None
                and sizes_of(bias) == (product.columns,)
                and is_constant(bias)
            ):
                return replace(product, bias=bias, result=value)
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
    if rows is None or weight is None or len(sizes_of(rows)) < 2 or is_constant(rows) or not is_constant(weight):
        return None
    if [type(size) for size in sizes_of(weight)] != [int, int]:
        return None
    product = Product(rows, weight, bias, turned, value)
    return product if bias is None or (is_constant(bias) and sizes_of(bias) == (product.columns,)) else None


def _shape(value: ir.Value) -> tuple[int, ...]:
    """Return a value's shape, with `OPEN` for an open number of sequences and -1 for any other unknown size."""
    sizes = (None,) if value.shape is None else sizes_of(value)
    return tuple(size if isinstance(size, int) else OPEN if size == BATCH else -1 for size in sizes)


def columns_of(build: Builder, view: View) -> tuple[ir.Value, ir.Value | None]:
    """Return the columns of the weight that a view reads, as [C, D], and their bias [C] or None.

    Columns of the axis with the largest step come first. Both results are operators on constants, so the weight is
    stored once, and engines compute the results when they load the graph.
    """
    product, which = view.product, np.array([view.first_column])
    for one in view.columns:
        which = (which[:, None] + np.arange(one.size) * one.step).ravel()
    weight = product.weight if product.turned else build.transpose(product.weight, (1, 0))
    parts = [None if one is None else _columns(build, one, which, product.columns) for one in (weight, product.bias)]
    assert parts[0] is not None
    return parts[0], parts[1]


def _columns(build: Builder, constant: ir.Value, which: NDArray[np.int64], columns: int) -> ir.Value:
    first, end = int(which[0]), int(which[-1]) + 1
    if end - first > len(which):
        return build.gather(constant, which, 0)
    return constant if len(which) == columns else build.slice(constant, 0, first, end)
