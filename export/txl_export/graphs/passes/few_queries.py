"""Attention of few queries over many rows, without keys and values.

A key is a row times a weight, and a score is a query times a key. So a score is also (query times weight) times row:
where there are fewer queries than rows, the weight is better multiplied by the queries. In the same way, the sum of
values under probabilities is the sum of rows under them, times a weight. A step that remembers rows and turns them all
into keys and values anew, as GTrXL does, then takes half of the time.
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
"""How many times as many multiplications keys or values have to take."""


def take_queries_to_rows(graph: ir.Graph) -> None:
    """Replace products of queries with keys, and of probabilities with values, where there are few queries."""
    build = Builder(graph, "rows")
    for node in list(graph):
        is_product = node.op_type == "MatMul" and node.outputs[0].dtype == ir.DataType.FLOAT
        if is_product and (found := _attention(node)) is not None:
            _replace(build.at(node), node, found)


@dataclass(frozen=True)
class _Attention:
    """A product of queries with keys, or of probabilities with values.

    Attributes:
        keys: whether it is with keys [..., d, R]; values are [..., R, d].
        view: the keys or values.
        batch, head: axes of sequences and of heads, where there are any; everything else in front has one element.
        slots, inside: the axes of R and of d.
        queries: how many, of a sequence and a head.
        size: the number of sequences, -1 where it is open.
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
        """The sizes of the axes before the last two."""
        found = list(self.view.shape[:-2])
        if self.batch is not None:
            found[self.batch.place] = self.size
        return found

    @property
    def shared(self) -> list[int]:
        """The same of what all sequences share."""
        return [self.heads if self.head and self.head.place == at else 1 for at in range(len(self.front))]

    @property
    def is_joined(self) -> bool:
        """Whether queries of all heads stand together in each sequence."""
        return self.batch is None or self.head is None or self.batch.place < self.head.place


def _attention(node: ir.Node) -> _Attention | None:
    """What a product is, if it is one that is worth to be replaced."""
    one, many = node.inputs
    if one is None or many is None or not 3 <= len(sizes_of(many)) <= 4:
        return None
    queries = sizes_of(one)[-2] if len(sizes_of(one)) == len(sizes_of(many)) else None
    fronts = [to_reshape(sizes_of(value)[:-2]) for value in (one, many)]
    if not isinstance(queries, int) or fronts[0] != fronts[1]:  # a product may repeat an operand's only sequence
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
        found = _Attention(keys, view, one_batch, one_head, slots, inside, queries, size)
        if _is_less(found):
            return found
    return None


def _are_all(view: View) -> bool:
    """Whether the axes of rows run over all rows, each once."""
    counts = [*accumulate((axis.size for axis in reversed(view.rows)), mul, initial=1)]
    return counts == [*(axis.step for axis in reversed(view.rows)), view.row_count]


def _is_less(found: _Attention) -> bool:
    """Whether it takes enough fewer multiplications than today; an open number of sequences may be one."""
    width, slots, inside, asked = found.view.product.width, found.slots.size, found.inside.size, found.queries
    today = found.heads * inside * slots * (width + asked)
    then = asked * found.heads * width * (inside + slots)
    return today >= GAIN * then and (today - then) * max(found.size, 1) >= LEAST


def _replace(build: Builder, node: ir.Node, found: _Attention) -> None:
    old, one = node.outputs[0], node.inputs[0]
    assert one is not None
    apart = len(found.view.shape) != len(sizes_of(one))
    shown = build.reshape(one, [*found.front, found.queries, sizes_of(one)[-1]]) if apart else one
    made = _scores(build, shown, found) if found.keys else _sums(build, shown, found, _sums_to_one(one))
    build.replace(old, build.reshape(made, [-1, *sizes_of(old)[1:]]) if apart else made)


def _scores(build: Builder, queries: ir.Value, found: _Attention) -> ir.Value:
    """Queries [..., q, d] to scores [..., q, R]."""
    queries, width = build.scaled(queries, found.view.factor), found.view.product.width
    weight, bias = _by_heads(build, found)
    asking = _multiply(build, queries, weight, found, width)
    scores = build.op("MatMul", [_joined(build, asking, found, width), _rows(build, found)])
    scores = build.reshape(scores, [*found.front, found.queries, found.slots.size])
    if bias is None:
        return scores
    bias = build.reshape(bias, [*found.shared, found.inside.size, 1])
    return build.op("Add", [scores, build.op("MatMul", [queries, bias])])


def _sums(build: Builder, shares: ir.Value, found: _Attention, whole: bool) -> ir.Value:
    """Probabilities [..., q, R] to sums of values [..., q, d]; `whole` where a query's are 1 in all."""
    weight, bias = _by_heads(build, found)
    sums = build.op("MatMul", [_joined(build, shares, found, found.slots.size), _rows(build, found)])
    sums = build.reshape(sums, [*found.front, found.queries, found.view.product.width])
    weight = build.transpose(weight, (1, 0) if found.head is None else (0, 2, 1))
    sums = _multiply(build, sums, weight, found, found.inside.size)
    if bias is not None:
        bias = build.reshape(bias, [*found.shared, 1, found.inside.size])
        if not whole:
            bias = build.op("Mul", [bias, build.op("ReduceSum", [shares, build.numbers(-1)], keepdims=1)])
        sums = build.op("Add", [sums, bias])
    return build.scaled(sums, found.view.factor)


def _by_heads(build: Builder, found: _Attention) -> tuple[ir.Value, ir.Value | None]:
    """The weight of keys or values as [H, d, D], or [d, D] where there is one head, and the bias as [H, d] or [d]."""
    weight, bias = columns_of(build, found.view)
    if found.head is None:
        return weight, bias
    split = [axis.size for axis in found.view.columns]
    turn = [0, 1] if found.view.columns[0] is found.head else [1, 0]
    weight = build.transpose(build.reshape(weight, [*split, found.view.product.width]), [*turn, 2])
    return weight, None if bias is None else build.transpose(build.reshape(bias, split), turn)


def _multiply(build: Builder, value: ir.Value, weight: ir.Value, found: _Attention, width: int) -> ir.Value:
    """[..., q, a] times a weight of each head, [H, a, b], or of all, [a, b]: all sequences in one product a head."""
    if found.head is None or found.batch is None:
        return build.op("MatMul", [value, weight])
    turn = [1, 0, 2, 3] if found.is_joined else [0, 1, 2, 3]
    front = [found.heads, found.size]
    value = build.reshape(
        build.transpose(value, turn), [found.heads, -1, found.inside.size if found.keys else found.view.product.width]
    )
    made = build.reshape(build.op("MatMul", [value, weight]), [*front, found.queries, width])
    return build.transpose(made, turn)


def _joined(build: Builder, value: ir.Value, found: _Attention, width: int) -> ir.Value:
    """[..., q, n] with the queries of all heads of a sequence as one axis, where they stand together."""
    if not found.is_joined:
        return value
    front = [] if found.batch is None else [found.size]
    return build.reshape(value, [*front, found.heads * found.queries, width])


def _rows(build: Builder, found: _Attention) -> ir.Value:
    """The rows of each sequence, as the last but one axis for sums, and as the last for scores."""
    value, axes = found.view.product.rows, found.view.rows
    shape = [found.size if axis is found.batch else axis.size for axis in axes]
    if to_reshape(sizes_of(value)[:-1]) != shape:
        value = build.reshape(value, [*shape, found.view.product.width])
    slots = axes.index(found.slots)
    front = [] if found.batch is None else [1 - slots]
    return build.transpose(value, [*front, len(axes), slots] if found.keys else [*front, slots, len(axes)])


def _sums_to_one(shares: ir.Value) -> bool:
    node = shares.producer()
    last = len(sizes_of(shares)) - 1
    return node is not None and node.op_type == "Softmax" and node.attributes.get_int("axis", -1) in (-1, last)
