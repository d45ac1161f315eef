"""Takes an LSTM, GRU or RNN that runs over one position apart into products and activations.

ONNX Runtime's LSTM, GRU and RNN clip their gates and so lose NaN: a broken sensor becomes a plausible number. Products
and activations keep NaN. Two measures make them as fast as the operator. First, gates with the same activation are one
product, of input and state side by side. Second, arithmetic on weights is left to the engine, which does it once. So
the file has the weights as they are, and a program of many positions, which keeps the operator, shares them.

torch's LSTMCell and GRUCell, captured as a product of the input and a product of the state, get the same form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import onnx_ir as ir

from txl_export.graphs.half import RECURRENT
from txl_export.graphs.passes.builder import Builder
from txl_export.graphs.passes.values import constant, size_along, size_of, sizes_of

_ACTIVATIONS = {"LSTM": (["Sigmoid", "Tanh", "Tanh"],), "GRU": (["Sigmoid", "Tanh"],), "RNN": (["Tanh"], ["Relu"])}
_UNUSUAL = ("activation_alpha", "activation_beta", "clip")
"""Attributes with which an LSTM, GRU or RNN is left unchanged."""

_Value: TypeAlias = "ir.Value | None"
_Product: TypeAlias = "tuple[ir.Value, ir.Value, _Value]"
"""The operands of a product x @ weights.T + bias: x [B, k], weights [n, k] and bias [n] or None."""


def take_cells_apart(graph: ir.Graph) -> None:
    """Replace recurrent operators over one position, and torch's cells, in place; values have types and shapes."""
    build = Builder(graph, "cell")
    for node in list(graph):
        cell = _Cell(build.at(node), node)
        if node.op_type in RECURRENT and _is_usual(node):
            cell.replace_operator()
        elif node.op_type == "Split" and len(node.outputs) == 4:
            cell.replace_lstm_cell()
        elif node.op_type == "Split" and len(node.outputs) == 3:
            cell.replace_gru_cell()
    graph.sort()


def _is_usual(node: ir.Node) -> bool:
    """Return whether an LSTM, GRU or RNN runs one position of float32 forward, from a state, with usual activations.

    An operator with peepholes, lengths or an attribute of `_UNUSUAL` is not usual.
    """
    x, _, r, _, lengths, *states = (*node.inputs, *(None,) * 3)[:7]
    peepholes, attributes = node.inputs[7:], node.attributes
    needed = states if node.op_type == "LSTM" else states[:1]
    return (
        x is not None
        and x.dtype == ir.DataType.FLOAT
        and size_of(x, 0) == 1
        and isinstance(size_of(r, 2), int)
        and lengths is None
        and None not in needed
        and not any(peepholes)
        and attributes.get_string("direction", "forward") == "forward"
        and not attributes.get_int("layout", 0)
        and not attributes.get_int("input_forget", 0)
        and not any(name in attributes for name in _UNUSUAL)
        and [*attributes.get_strings("activations", _ACTIVATIONS[node.op_type][0])] in _ACTIVATIONS[node.op_type]
    )


class _Cell:
    """Writes the plain operators that replace one LSTM, GRU or RNN, or one of torch's cells."""

    def __init__(self, build: Builder, node: ir.Node) -> None:
        self._build, self._node = build, node

    def replace_operator(self) -> None:
        """Replace an LSTM, GRU or RNN of one time step by plain nodes, e.g. X [1, B, k] → Y [1, 1, B, d]."""
        node, build, op = self._node, self._build, self._build.op
        x, w, r, hidden = (op("Squeeze", [node.inputs[index], build.numbers(0)]) for index in (0, 1, 2, 5))
        size = size_along(node.inputs[2], 2) or 0
        biases: list[_Value] = [None, None]
        if node.inputs[3] is not None:
            rows = build.reshape(node.inputs[3], [2, -1])
            biases = [build.gather(rows, which, 0) for which in (0, 1)]
        if node.op_type == "LSTM":
            i, o, f, c = self._lstm((x, w, biases[0]), (hidden, r, biases[1]), size, last=3)
            cell = op("Add", [op("Mul", [i, c]), op("Mul", [f, node.inputs[6]])])
            new = op("Mul", [o, op("Tanh", [cell])])  # the state [1, B, d] has the shape of the cell that enters
            self._put(node.outputs, (op("Unsqueeze", [new, build.numbers(0)]), new, cell))
            return
        if node.op_type == "GRU":
            after = bool(node.attributes.get_int("linear_before_reset", 0))
            z, _, n = self._gru((x, w, biases[0]), (hidden, r, biases[1]), size, reset=1, after=after)
            new = op("Add", [n, op("Mul", [z, op("Sub", [hidden, n])])])
        else:
            (kind,) = node.attributes.get_strings("activations", ["Tanh"])
            joined, both = build.concat([x, hidden], 1), build.concat([w, r], 1)
            new = op(kind, [self._product(joined, both, self._sum(biases))])
        self._put(node.outputs, [op("Unsqueeze", [new, build.numbers(*axes)]) for axes in ((0, 1), (0,))])

    def replace_lstm_cell(self) -> None:
        """Replace torch's LSTMCell, if the node is the Split of its gates i, f, g and o."""
        node, kinds = self._node, ("Sigmoid", "Sigmoid", "Tanh", "Sigmoid")
        gates = [_reader(value, kind) for value, kind in zip(node.outputs, kinds, strict=True)]
        total = _producer(node.inputs[0], "Add")
        one, two = (_product(value) for value in total.inputs) if total else (None, None)
        size = _part(node)
        if one and two and _fit(one, two, 4 * size) and None not in gates:
            self._put(gates, self._lstm(one, two, size, last=2))

    def replace_gru_cell(self) -> None:
        """Replace torch's GRUCell, if the node is the Split of the state's product into gates r, z and new values n."""
        node = self._node
        parts = list(node.outputs)
        r, z = (_reader(_reader(value, "Add"), "Sigmoid") for value in parts[:2])
        scaled = _reader(parts[2], "Mul")
        before = _reader(scaled, "Add")
        n = _reader(before, "Tanh")
        others = [_other(_reader(parts[0], "Add"), parts[0]), _other(_reader(parts[1], "Add"), parts[1])]
        others.append(_other(before, scaled))
        split = _producer(others[0], "Split")
        if None in (r, z, n) or _other(scaled, parts[2]) is not r or split is None or [*split.outputs] != others:
            return
        one, two = _product(split.inputs[0]), _product(node.inputs[0])
        size = _part(node)
        if one and two and _fit(one, two, 3 * size) and size == _part(split):
            self._put((r, z, n), self._gru(one, two, size, reset=0, after=True))

    def _lstm(self, one: _Product, two: _Product, size: int, last: int) -> list[ir.Value]:
        """Return the four gates in the order of the weights, [B, size] each; gate `last` has tanh, others sigmoid."""
        build, before, behind = self._build, (0, last * size), ((last + 1) * size, 4 * size)
        joined, both = build.concat([one[0], two[0]], 1), build.concat([one[1], two[1]], 1)
        bias = self._sum([one[2], two[2]])
        three, alone = (
            self._product(joined, self._rows(both, *chosen), bias and self._rows(bias, *chosen))
            for chosen in ([before, behind], [(before[1], behind[0])])
        )
        gates = build.split(build.op("Sigmoid", [three]), [size] * 3, 1)
        return [*gates[:last], build.op("Tanh", [alone]), *gates[last:]]

    def _gru(self, one: _Product, two: _Product, size: int, reset: int, after: bool) -> list[ir.Value]:
        """Return the two gates in the order of the weights, and the new values; each is [B, size].

        Args:
            one, two: the product of the input, and the product of the state.
            size: the width of the state, d.
            reset: the number of the gate that scales the state.
            after: the gate scales the state's product instead of the state.
        """
        build, op, gated, rest = self._build, self._build.op, (0, 2 * size), (2 * size, 3 * size)
        (x, w, first), (hidden, r, second) = one, two
        both = build.concat([self._rows(w, gated), self._rows(r, gated)], 1)
        bias = self._sum([bias and self._rows(bias, gated) for bias in (first, second)])
        gates = build.split(op("Sigmoid", [self._product(build.concat([x, hidden], 1), both, bias)]), [size] * 2, 1)
        first, second = (bias and self._rows(bias, rest) for bias in (first, second))
        if after:
            part = op("Mul", [gates[reset], self._product(hidden, self._rows(r, rest), second)])
            part = part if first is None else op("Add", [part, first])
        else:
            part = self._product(op("Mul", [gates[reset], hidden]), self._rows(r, rest), self._sum([first, second]))
        return [*gates, op("Tanh", [self._product(x, self._rows(w, rest), part)])]

    def _product(self, x: ir.Value, weights: ir.Value, bias: _Value) -> ir.Value:
        return self._build.op("Gemm", [x, weights] if bias is None else [x, weights, bias], transB=1)

    def _sum(self, biases: Sequence[_Value]) -> _Value:
        there = [bias for bias in biases if bias is not None]
        return self._build.op("Add", there) if len(there) > 1 else there[0] if there else None

    def _rows(self, value: ir.Value, *chosen: tuple[int, int]) -> ir.Value:
        """Return the chosen ranges of a constant's rows, one after the other."""
        return self._build.concat([self._build.slice(value, 0, *bounds) for bounds in chosen if len({*bounds}) > 1], 0)

    def _put(self, old: Sequence[_Value], new: Sequence[ir.Value]) -> None:
        """Replace each old value by the new value at its place; values beyond the shorter list stay."""
        for before, after in zip(old, new, strict=False):
            assert before is not None
            self._build.replace(before, after)


def _reader(value: _Value, kind: str) -> _Value:
    """Return the result of the only operator that reads a value, if that operator is of this kind; else None."""
    uses = () if value is None or value.is_graph_output() else value.uses()
    nodes = [use.node for use in uses]
    return nodes[0].outputs[0] if len(nodes) == 1 and nodes[0].op_type == kind else None


def _producer(value: _Value, kind: str) -> ir.Node | None:
    """Return the operator that makes a value, if it is of this kind; else None."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == kind else None


def _other(result: _Value, operand: _Value) -> _Value:
    """Return the operand that is not `operand` of the binary operator that made `result`; None if there is none."""
    node = None if result is None else result.producer()
    others = [] if node is None else [value for value in node.inputs if value is not operand]
    return others[0] if len(others) == 1 else None


def _product(value: _Value) -> _Product | None:
    """Return the product that makes a value, if its weights and bias are constants as in torch's Linear; else None."""
    node = _producer(value, "Gemm")
    if node is None or any(node.attributes.get_float(name, 1.0) != 1 for name in ("alpha", "beta")):
        return None
    x, weights, bias = (*node.inputs, None)[:3]
    turned = [node.attributes.get_int(name, 0) for name in ("transA", "transB")]
    if x is None or weights is None or constant(weights) is None or turned != [0, 1]:
        return None
    fits = bias is None or (constant(bias) is not None and sizes_of(bias) == (size_of(weights, 0),))
    return (x, weights, bias) if fits else None


def _fit(one: _Product, two: _Product, rows: int) -> bool:
    """Return whether two products [B, k] · [rows, k] have the same B, and `rows` rows of weights each."""
    same = size_of(one[0], 0) == size_of(two[0], 0) is not None
    return same and rows > 0 and size_of(one[1], 0) == size_of(two[1], 0) == rows


def _part(node: ir.Node) -> int:
    """Return the size of each part if a node splits the last of two axes into equal parts; else 0."""
    size, *others = (size_of(value, 1) for value in node.outputs)
    along = node.attributes.get_int("axis", 0) in (1, -1) and len(sizes_of(node.inputs[0])) == 2
    return size if along and isinstance(size, int) and {*others} == {size} else 0
