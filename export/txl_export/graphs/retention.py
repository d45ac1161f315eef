"""Finds states that are a matrix [dk, dv] of keys by values per head, which decays, is added to, and is read once.

    S' = a S + k vᵀ                      retention; gated linear attention, with a decay a per key
    S' = a S + k (β (v - (a S)ᵀ k))ᵀ     the gated delta rule
    o  = q S'

All positions of such a state are a few products (`graphs.linear_attention`). States are recognised by their nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from txl_export.graphs.linear_attention import FEW_VALUES
from txl_export.graphs.passes.values import constant, numbers_of, sizes_of


class Retention(NamedTuple):
    """The parts of a state's recurrence; all are values of the step.

    Attributes:
        nodes: the nodes that compute, read and return the state.
        heads, keys, values: sizes of the state [B, *heads, dk, dv].
        queries: number of rows of q per head.
        query, read: the query q and the result o.
        key, value: the key k and the value v.
        factors: numbers, one per head or one in all, by which k vᵀ is multiplied.
        beta: β; None without the delta rule.
        rates: number of decays per head, 1 or dk; 0 without decay.
        decay: log a [*heads, rates] as an array; or a value x with a = exp(x) or sigmoid(x), according to `decay_by`.
    """

    nodes: Sequence[ir.Node]
    heads: Sequence[int]
    keys: int
    values: int
    queries: int
    query: ir.Value
    read: ir.Value
    key: ir.Value
    value: ir.Value
    factors: Sequence[ir.Value]
    beta: ir.Value | None
    rates: int
    decay: NDArray[Any] | ir.Value | None
    decay_by: str


def find_retention(
    state: ir.Value, after: Mapping[ir.Value, ir.Value], nodes: Sequence[ir.Node], elsewhere: Collection[object]
) -> Retention | None:
    """Return the recurrence of a state if it has one of the forms above; else None.

    Args:
        state: the only state of a core.
        after: for each state, its next value.
        nodes: the nodes of the core.
        elsewhere: nodes of other cores, and values that are outputs of the step.
    """
    sizes = sizes_of(state)
    batch, *numbers = sizes or (0,)
    heads_and = [size for size in numbers if isinstance(size, int)]
    if isinstance(batch, int) or len(heads_and) != len(numbers) or len(numbers) < 2 or state.dtype != ir.DataType.FLOAT:
        return None
    if 1 in heads_and[-2:] or list(after.values()).count(after[state]) > 1:
        return None
    return _Form(state, after[state], nodes, elsewhere, heads_and).parts()


class _Form:
    """Matches a recurrence with the forms; `_used` collects the nodes that were matched."""

    def __init__(
        self,
        state: ir.Value,
        new: ir.Value,
        nodes: Sequence[ir.Node],
        elsewhere: Collection[object],
        sizes: Sequence[int],
    ) -> None:
        self._state, self._new, self._nodes, self._elsewhere = state, new, nodes, elsewhere
        self._batch, self._heads, (self._keys, self._values) = sizes_of(state)[0], sizes[:-2], sizes[-2:]
        self._inside = {state, *(value for node in nodes for value in node.outputs)}
        self._used = set[ir.Node]()

    def parts(self) -> Retention | None:
        """Return the parts if all nodes match, and no other node reads a value between them; else None."""
        for faded, written in self._pairs(self._new, "Add"):
            fading, product, reading = self._fading(faded), self._product(written), self._reading()
            if fading is None or product is None or reading is None:
                continue
            (rates, decay, by), (key, row, factors), (query, read, readers) = fading, product, reading
            value, beta = self._learning(row, faded, key) or (row, None)
            operands = [query, key, value, *factors, *([] if beta is None else [beta])]
            queries = _last(query)[0] if readers[0].op_type == "MatMul" else 1
            right = (
                self._is_of(query, queries, self._keys)
                and self._is_of(key, self._keys)
                and self._is_of(value, self._values)
                and (beta is None or (self._is_of(beta) and not factors))
                and self._inside.isdisjoint(operands)
                and self._used.issuperset(self._nodes)
                and all(use.node in self._used for one in self._inside - {self._new} for use in one.uses())
                and not any(node in self._elsewhere for node in readers)
                and not (rates > 1 and self._values < FEW_VALUES)
            )
            if right:
                sizes = self._heads, self._keys, self._values, queries
                return Retention(
                    [*self._nodes, *readers], *sizes, query, read, key, value, factors, beta, rates, decay, by
                )
        return None

    def _fading(self, faded: ir.Value) -> tuple[int, NDArray[Any] | ir.Value | None, str] | None:
        """Return rates, decay and decay_by (see `Retention`) if `faded` is a S or S; else None."""
        if faded is self._state:
            return 0, None, ""
        for state, factor in self._pairs(faded, "Mul"):
            rates = {(1, 1): 1, (self._keys, 1): self._keys}.get(_last(factor), 0)
            if state is not self._state or not rates:
                continue
            if (known := constant(factor)) is not None:
                if not np.all((known > 0) & (known <= 1)):
                    return None
                whole = np.broadcast_to(known, (*([1] * (known.ndim - len(self._heads) - 2)), *self._heads, rates, 1))
                return rates, np.log(whole.astype(np.float64)).reshape(*self._heads, rates).astype(np.float32), ""
            node = self._bare(factor).producer()
            if node is not None and node.op_type in ("Exp", "Sigmoid") and self._is_of(factor, rates):
                return rates, node.inputs[0], node.op_type
        return None

    def _product(self, written: ir.Value) -> tuple[ir.Value, ir.Value, list[ir.Value]] | None:
        """Return the column, the row and the further factors whose product `written` is; None if it is none."""
        left, parts = [written], dict[tuple[Any, ...], list[ir.Value]]()
        while left:
            value = left.pop()
            if _last(value) == (self._keys, self._values):
                if not (pairs := self._pairs(value, "Mul")):
                    return None
                left += pairs[0]
            else:
                parts.setdefault(_last(value), []).append(value)
        columns, rows, factors = (parts.pop(which, []) for which in ((self._keys, 1), (1, self._values), (1, 1)))
        return (columns[0], rows[0], factors) if len(columns) == len(rows) == 1 and not parts else None

    def _learning(self, row: ir.Value, faded: ir.Value, key: ir.Value) -> tuple[ir.Value, ir.Value] | None:
        """Return v and β if `row` is β (v - (a S)ᵀ k); else None."""
        for lacks, beta in self._pairs(self._bare(row), "Mul"):
            for value, known in self._pairs(self._bare(lacks), "Sub")[:1]:
                for by, read, nodes in self._reads(faded) if _last(beta)[1] == 1 else ():
                    if read is self._bare(known) and self._bare(by) is self._bare(key):
                        self._used.update(nodes)
                        return value, beta
        return None

    def _reading(self) -> tuple[ir.Value, ir.Value, list[ir.Node]] | None:
        """Return q, the result and the nodes of q S', if only these nodes and the next step read S'; otherwise None."""
        uses = [use.node for use in self._new.uses() if use.node not in self._used]
        handed_on = [node for node in uses if node.op_type == "Identity" and not list(node.outputs[0].uses())]
        reads = self._reads(self._new)
        results = {self._new, *(node.outputs[0] for node in handed_on)}
        if len(reads) != 1 or len(uses) != len(handed_on) + 1 or not results.isdisjoint(self._elsewhere):
            return None
        query, read, nodes = reads[0]
        return query, read, [*nodes, *handed_on]

    def _reads(self, state: ir.Value) -> list[tuple[ir.Value, ir.Value, list[ir.Node]]]:
        """Return all reads of a matrix by rows: MatMul(q, S), or a ReduceSum over keys of S times q."""
        readers = []
        for node in (use.node for use in state.uses()):
            first, *others = [one for one in node.inputs if one is not None]
            if node.op_type == "MatMul" and others == [state] and _last(first)[1] == self._keys:
                readers.append((first, node.outputs[0], [node]))
            (by,) = [one for one in (first, *others) if one is not state][:1] or (state,)
            after = [use.node for use in node.outputs[0].uses()]
            if (
                node.op_type == "Mul"
                and _last(by) == (self._keys, 1)
                and [one.op_type for one in after] == ["ReduceSum"]
            ):
                axes, rank = numbers_of((*after[0].inputs, None)[1]) or [], len(self._heads) + 3
                if [axis % rank for axis in axes] == [rank - 2]:
                    readers.append((by, after[0].outputs[0], [node, after[0]]))
        return readers

    def _pairs(self, value: ir.Value, kind: str) -> list[tuple[ir.Value, ir.Value]]:
        """Return both orders of the two inputs of a value's operator, if the operator is of this kind; else []."""
        node = value.producer()
        if node is None or node.op_type != kind:
            return []
        self._used.add(node)
        return list(permutations([one for one in node.inputs if one is not None], 2))

    def _bare(self, value: ir.Value) -> ir.Value:
        """Return the value on which the Unsqueeze nodes before `value` began; `value` itself if there are none."""
        while (node := value.producer()) is not None and node.op_type == "Unsqueeze" and node.inputs[0] is not None:
            self._used.add(node)
            value = node.inputs[0]
        return value

    def _is_of(self, value: ir.Value, *numbers: int) -> bool:
        """Return whether a value has the shape [B, *heads, *numbers], apart from axes of size 1."""
        wanted = [self._batch, *self._heads, *numbers]
        return [size for size in sizes_of(value) if size != 1] == [size for size in wanted if size != 1]


def _last(value: ir.Value) -> tuple[Any, ...]:
    """Return the last two sizes of a value, e.g. (dk, 1) for a column; (1, 1) for a number."""
    return (1, 1, *sizes_of(value))[-2:]
