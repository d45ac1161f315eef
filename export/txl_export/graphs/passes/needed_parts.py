"""Computes only the rows and columns of a product that are read.

If queries, keys and values are one product, this product has queries for all rows, although only the queries of the
last rows are read. Leaving the unread ones out saves up to a third of the product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from txl_runtime.bundle.open_batch import BATCH

from txl_export.graphs.passes.builder import Builder
from txl_export.graphs.passes.values import sizes_of
from txl_export.graphs.passes.views import LEAST, MOVING, OPEN, Axis, View, columns_of, product_of, view_of

MOST = 0.7
"""Largest share of a product's multiplications that may remain; if more remain, nothing is replaced."""


def compute_what_is_read(graph: ir.Graph) -> None:
    """Replace a product of which only parts are read by one product per part, if that saves enough."""
    build = Builder(graph, "read")
    for node in list(graph):
        value = node.outputs[0]
        if (product := product_of(value)) is None:
            continue
        ends = list(_ends(value))
        if sum(map(_fewest, ends)) > MOST * _fewest(value):
            continue  # sizes are enough to decide this, before large arrays of numbers are made
        parts = [part for part in map(_part, ends) if part is not None]
        if not parts or len(parts) < len(ends):
            continue
        size, left = parts[0].view.row_count * product.columns, sum(part.size for part in parts)
        if left <= MOST * size and (size - left) * product.width >= LEAST:
            for end, part in zip(ends, parts, strict=True):
                _replace(build, end, part)


@dataclass(frozen=True)
class _Cut:
    """A range that is read along one axis of a product's rows: indices `first` … `first + count - 1` of `size`.

    `axis` is the view's axis that runs over these indices; None if only one index is read.
    """

    size: int
    first: int
    count: int
    axis: Axis | None


@dataclass(frozen=True)
class _Part:
    """A block of a product that is read, with a cut for each axis of the product's rows."""

    view: View
    cuts: tuple[_Cut, ...]

    @property
    def size(self) -> int:
        """The number of elements of the block."""
        return int(np.prod([*(cut.count for cut in self.cuts), *(axis.size for axis in self.view.columns)]))


def _fewest(value: ir.Value) -> int:
    """Return a lower bound of a value's number of elements: an open B counts as `OPEN`, any unknown size as 1."""
    return int(np.prod([size if isinstance(size, int) else OPEN if size == BATCH else 1 for size in sizes_of(value)]))


def _ends(value: ir.Value) -> Iterator[ir.Value]:
    """Yield the values that a value becomes through moving operators, up to those that any other operator reads."""
    readers = [use.node for use in value.uses()]
    if value.is_graph_output() or any(node.op_type not in MOVING for node in readers):
        yield value
        return
    for node in readers:
        for output in node.outputs:
            yield from _ends(output)


def _part(end: ir.Value) -> _Part | None:
    """Return the block of a product that a value shows; None if the value is not exactly one block."""
    view = view_of(end)
    if view is None:
        return None
    sizes, cuts = sizes_of(view.product.rows)[:-1], list[_Cut]()
    lead = [size if isinstance(size, int) else OPEN for size in sizes]
    for place, size in enumerate(lead):
        step = int(np.prod(lead[place + 1 :], dtype=np.int64))
        axis = next((one for one in view.rows if one.step == step and size > 1), None)
        first, count = view.first_row // step % size, 1 if axis is None else axis.size
        is_open = not isinstance(sizes[place], int)
        if first + count > size or (is_open and count < size):
            return None
        cuts.append(_Cut(size, first, count, axis))
    return _Part(view, tuple(cuts)) if sum(cut.axis is not None for cut in cuts) == len(view.rows) else None


def _replace(build: Builder, end: ir.Value, part: _Part) -> None:
    node, view, sizes = end.producer(), part.view, sizes_of(end)
    assert node is not None
    build.at(node)
    rows = view.product.rows
    for place, cut in enumerate(part.cuts):
        if cut.count < cut.size:
            rows = build.slice(rows, place, cut.first, cut.first + cut.count)
    weight, bias = columns_of(build, view)
    product = build.op("MatMul", [rows, build.transpose(weight, (1, 0))])
    if bias is not None:
        product = build.op("Add", [product, bias])
    axes = [*(cut.axis for cut in part.cuts if cut.axis is not None), *view.columns]
    product = build.reshape(product, [axis.size if isinstance(sizes[axis.place], int) else None for axis in axes])
    product = build.transpose(product, np.argsort([axis.place for axis in axes]).tolist())
    if len(axes) < len(view.shape):
        product = build.reshape(product, sizes)
    build.replace(end, build.scaled(product, view.factor))
