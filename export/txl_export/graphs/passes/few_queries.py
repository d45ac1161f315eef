"""Computes attention of few queries over many rows without making keys and values of the rows.

A score is q · (row W). It is also (q W) · row, which costs less if there are fewer queries than rows. Likewise the
probabilities' sum of values is their sum of rows, times a weight. A step that stores rows and recomputes all keys and
values from them, as GTrXL does, then takes half of its time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, product
from operator import mul

import onnx_ir as ir

from txl_export.graphs.passes.builder import Builder
from txl_export.graphs.passes.values import sizes_of, to_reshape
from txl_export.graphs.passes.views import LEAST, Axis, View, columns_of, views_of

GAIN = 1.5
"""Least ratio of multiplications before to multiplications after; if it is smaller, nothing is replaced."""


def take_queries_to_rows(graph: ir.Graph) -> None:
    """Replace products of queries with keys, and of probabilities with values, if there are few queries."""
    build = Builder(graph, "rows")
    for node in list(graph):
        is_product = node.op_type == "MatMul" and node.outputs[0].dtype == ir.DataType.FLOAT
        if is_product and (attention := _attention(node)) is not None:
            _replace(build.at(node), node, attention)


@dataclass(frozen=True)
class _Attention:
    """A product of queries with keys, or of probabilities with values.

    Attributes:
        keys: True for keys [..., d, R], False for values [..., R, d], where R is the number of rows.
        view: the keys or values, as a view of their product.
        batch, head: the axes of sequences and of heads, or None; any other leading axis has size 1.
        slots, inside: the axes of R and of d.
        queries: number of queries per sequence and head.
        size: number of sequences, -1 if open.
    """

    keys: bool
    view: View
    batch: Axis | None
    head: Axis | None
    slots: Axis
    inside: Axis
    queries: int
    size: int

    @property
    def heads(self) -> int:
        return 1 if self.head is None else self.head.size

    @property
    def front(self) -> list[int]:
        """The sizes of all axes of keys or values before the last two."""
        sizes = list(self.view.shape[:-2])
        if self.batch is not None:
            sizes[self.batch.place] = self.size
        return sizes

    @property
    def shared(self) -> list[int]:
        """The leading sizes of a value that all sequences share: the number of heads at their axis, 1 at all others."""
        return [self.heads if self.head and self.head.place == at else 1 for at in range(len(self.front))]

    @property
    def is_joined(self) -> bool:
        """True if queries are [B, heads, …], so that all heads of a sequence stand together."""
        return self.batch is None or self.head is None or self.batch.place < self.head.place


def _attention(node: ir.Node) -> _Attention | None:
    """Return the parts of a MatMul of attention whose replacement saves enough; None for any other MatMul."""
    one, many = node.inputs
    if one is None or many is None or not 3 <= len(sizes_of(many)) <= 4:
        return None
    queries = sizes_of(one)[-2] if len(sizes_of(one)) == len(sizes_of(many)) else None
    fronts = [to_reshape(sizes_of(value)[:-2]) for value in (one, many)]
    if not isinstance(queries, int) or fronts[0] != fronts[1]:  # fronts differ if the product broadcasts an operand
        return None
    is_open = -1 in fronts[1]
    for view, keys in product(views_of(many), (True, False)):
        behind = len(view.shape)
        slots = next((axis for axis in view.rows if axis.place == behind - (1 if keys else 2)), None)
        inside = next((axis for axis in view.columns if axis.place == behind - (2 if keys else 1)), None)
        batch = [axis for axis in view.rows if axis is not slots]
        head = [axis for axis in view.columns if axis is not inside]
        if slots is None or inside is None or len(batch) > 1 or len(head) > 1 or view.first_row:
            continue
        if not _are_all(view) or (is_open and not batch):
            continue
        size = -1 if is_open else batch[0].size if batch else 1
        one_batch, one_head = (next(iter(axes), None) for axes in (batch, head))
        attention = _Attention(keys, view, one_batch, one_head, slots, inside, queries, size)
        if _is_less(attention):
            return attention
    return None


def _are_all(view: View) -> bool:
    """Return whether a view has every row of its product once, in order."""
    counts = [*accumulate((axis.size for axis in reversed(view.rows)), mul, initial=1)]
    return counts == [*(axis.step for axis in reversed(view.rows)), view.row_count]


def _is_less(attention: _Attention) -> bool:
    """Return whether the replacement saves at least a factor of `GAIN`, and at least `LEAST` multiplications.

    An open B counts as one sequence.
    """
    width, slots, inside, asked = (
        attention.view.product.width,
        attention.slots.size,
        attention.inside.size,
        attention.queries,
    )
    today = attention.heads * inside * slots * (width + asked)
    then = asked * attention.heads * width * (inside + slots)
    return today >= GAIN * then and (today - then) * max(attention.size, 1) >= LEAST


def _replace(build: Builder, node: ir.Node, attention: _Attention) -> None:
    old, one = node.outputs[0], node.inputs[0]
    assert one is not None
    apart = len(attention.view.shape) != len(sizes_of(one))
    shown = build.reshape(one, [*attention.front, attention.queries, sizes_of(one)[-1]]) if apart else one
    result = _scores(build, shown, attention) if attention.keys else _sums(build, shown, attention, _sums_to_one(one))
    build.replace(old, build.reshape(result, [-1, *sizes_of(old)[1:]]) if apart else result)


def _scores(build: Builder, queries: ir.Value, attention: _Attention) -> ir.Value:
    """Compute scores [..., q, R] from queries [..., q, d]."""
    queries, width = build.scaled(queries, attention.view.factor), attention.view.product.width
    weight, bias = _by_heads(build, attention)
    asking = _multiply(build, queries, weight, attention, width)
    scores = build.op("MatMul", [_joined(build, asking, attention, width), _rows(build, attention)])
    scores = build.reshape(scores, [*attention.front, attention.queries, attention.slots.size])
    if bias is None:
        return scores
    bias = build.reshape(bias, [*attention.shared, attention.inside.size, 1])
    return build.op("Add", [scores, build.op("MatMul", [queries, bias])])


def _sums(build: Builder, shares: ir.Value, attention: _Attention, whole: bool) -> ir.Value:
    """Sum the values of R rows, weighted by the probabilities `shares` [..., q, R]; the result is [..., q, d].

    `whole` says that the probabilities of a query sum to 1: a bias of the values is then added as it is.
    """
    weight, bias = _by_heads(build, attention)
    sums = build.op("MatMul", [_joined(build, shares, attention, attention.slots.size), _rows(build, attention)])
    sums = build.reshape(sums, [*attention.front, attention.queries, attention.view.product.width])
    weight = build.transpose(weight, (1, 0) if attention.head is None else (0, 2, 1))
    sums = _multiply(build, sums, weight, attention, attention.inside.size)
    if bias is not None:
        bias = build.reshape(bias, [*attention.shared, 1, attention.inside.size])
        if not whole:
            bias = build.op("Mul", [bias, build.op("ReduceSum", [shares, build.numbers(-1)], keepdims=1)])
        sums = build.op("Add", [sums, bias])
    return build.scaled(sums, attention.view.factor)


def _by_heads(build: Builder, attention: _Attention) -> tuple[ir.Value, ir.Value | None]:
    """Return the weight [H, d, D] of keys or values and its bias [H, d]; without heads [d, D] and [d]."""
    weight, bias = columns_of(build, attention.view)
    if attention.head is None:
        return weight, bias
    split = [axis.size for axis in attention.view.columns]
    turn = [0, 1] if attention.view.columns[0] is attention.head else [1, 0]
    weight = build.transpose(build.reshape(weight, [*split, attention.view.product.width]), [*turn, 2])
    return weight, None if bias is None else build.transpose(build.reshape(bias, split), turn)


def _multiply(build: Builder, value: ir.Value, weight: ir.Value, attention: _Attention, width: int) -> ir.Value:
    """Multiply [..., q, a] by a weight [H, a, b] per head, or by [a, b]; a head's product covers all sequences."""
    if attention.head is None or attention.batch is None:
        return build.op("MatMul", [value, weight])
    turn = [1, 0, 2, 3] if attention.is_joined else [0, 1, 2, 3]
    front = [attention.heads, attention.size]
    value = build.reshape(
        build.transpose(value, turn),
        [attention.heads, -1, attention.inside.size if attention.keys else attention.view.product.width],
    )
    result = build.reshape(build.op("MatMul", [value, weight]), [*front, attention.queries, width])
    return build.transpose(result, turn)


def _joined(build: Builder, value: ir.Value, attention: _Attention, width: int) -> ir.Value:
    """Reshape [..., q, n] so that the queries of all heads of a sequence share one axis, if `is_joined`."""
    if not attention.is_joined:
        return value
    front = [] if attention.batch is None else [attention.size]
    return build.reshape(value, [*front, attention.heads * attention.queries, width])


def _rows(build: Builder, attention: _Attention) -> ir.Value:
    """Return each sequence's rows as an operand: rows are the last axis for scores, else the axis before the last."""
    value, axes = attention.view.product.rows, attention.view.rows
    shape = [attention.size if axis is attention.batch else axis.size for axis in axes]
    if to_reshape(sizes_of(value)[:-1]) != shape:
        value = build.reshape(value, [*shape, attention.view.product.width])
    slots = axes.index(attention.slots)
    front = [] if attention.batch is None else [1 - slots]
    return build.transpose(value, [*front, len(axes), slots] if attention.keys else [*front, slots, len(axes)])


def _sums_to_one(shares: ir.Value) -> bool:
    node = shares.producer()
    last = len(sizes_of(shares)) - 1
    return node is not None and node.op_type == "Softmax" and node.attributes.get_int("axis", -1) in (-1, last)
