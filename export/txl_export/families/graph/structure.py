"""What the nodes of a graph say of its inputs and outputs, without running it: one pass from the inputs to the outputs.

Of every value it is known which inputs reach it, and in which way, as the bits of a whole number: bit i is input i.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import numpy_helper

from txl_export.families.graph.reading import Port, subgraphs

RECURRENT = {"LSTM": (5, 6), "GRU": (5,), "RNN": (5,)}
"""Operators that carry a state along a sequence, and which of their inputs it starts from."""
MOVES = frozenset(
    re.findall(
        r"\w+",
        "Identity Reshape Squeeze Unsqueeze Transpose Slice Split Flatten Expand Tile Cast Gather GatherND "
        "GatherElements Pad DepthToSpace SpaceToDepth Dropout ReverseSequence Compress Trilu ScatterElements "
        "ScatterND TensorScatter",
    )
)
"""Operators whose first input's numbers are the result's, at other places."""
SIZES = frozenset(("Shape", "Size"))
GENTLE = frozenset(("Add", "Sub", "Mul", "Div", "Sum"))
"""Operators that may add to a number, or multiply it by, what is no data at all."""
SCALES = frozenset(("Mul", "Where", "Clip", "Min", "Max", "Mod"))
"""Operators that a state passes which a flag resets, and an index that is kept in range."""
GATES, CANDIDATES = frozenset(("Sigmoid", "HardSigmoid")), frozenset(("Tanh", "Softsign", "Relu"))
FEW = 64
"""Numbers of a constant that are looked at: of a larger one its sizes are enough."""
BESIDE = 16
"""Inputs of a Concat that are taken for parts of a window; one of more is none."""
SCATTERS = {"ScatterElements": 1, "ScatterND": 1, "TensorScatter": 2}
"""Operators that write into their first input, and the input that says where."""


@dataclass
class Ways:
    """How inputs reach a value, each as bits.

    Attributes:
        reach: at all, by value and not by size.
        moved: some of their numbers are numbers of it, at other places.
        scaled: moved, or changed by `SCALES`.
        written: moved, and something is written among them at a place that is computed.
        beside: they stand before it in a Concat, so that the window of the two may be what moves on.
        recurrent: they are the first state of a recurrent operator, and this its last one.
        cell: they are carried over by a gate, and a bounded candidate is added, as cells of GRU and LSTM do.
    """

    reach: int = 0
    moved: int = 0
    scaled: int = 0
    written: int = 0
    beside: int = 0
    recurrent: int = 0
    cell: int = 0


PASSED = ("moved", "scaled", "written", "beside", "recurrent", "cell")
"""What a value keeps that is moved, or that something other than data is added to."""


@dataclass(frozen=True)
class Recurrence:
    """A recurrence inside the graph.

    Attributes:
        node, op: its name and operator.
        hidden: the size of its state; 0 where the node does not say it.
        direction: forward, reverse or bidirectional.
        starts: "anew" where it begins with the same numbers in every call, "given" where an input reaches its start.
        branch: the If in one of whose branches it stands, or "".
    """

    node: str
    op: str
    hidden: int
    direction: str
    starts: str
    branch: str


@dataclass(frozen=True)
class Window:
    """A convolution over positions of an input that reads ones before those that are new, as far as the graph says.

    Attributes:
        node: its name.
        input: what it reads; "" for what is computed.
        before: positions that it needs before the new ones.
        step: new positions that one of its results stands for.
        padded: whether the graph puts zeros there, so that it forgets them in every call.
    """

    node: str
    input: str
    before: int
    step: int
    padded: bool


@dataclass
class Structure:
    """What was found.

    Attributes:
        names: of the inputs; bit i is the i-th.
        outputs: the ways to each output.
        recurrences, windows: inside the graph.
        rows: of an input of indices, how many rows the smallest constant table has that it selects from.
        compared: of an input, the whole numbers that it is compared with.
        branching: inputs that decide which branch of an If runs.
    """

    names: tuple[str, ...]
    outputs: dict[str, Ways] = field(default_factory=dict)
    recurrences: list[Recurrence] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    compared: dict[str, list[int]] = field(default_factory=dict)
    branching: set[str] = field(default_factory=set)

    def bits(self, name: str) -> int:
        """The bit of an input."""
        return 1 << self.names.index(name)

    def among(self, bits: int) -> list[str]:
        """The inputs of these bits."""
        return [name for at, name in enumerate(self.names) if bits >> at & 1]


def read_structure(model: Any, inputs: Sequence[Port]) -> Structure:
    """Go through a graph once.

    Raises:
        KeyError: it lacks one of the inputs.
    """
    return _Pass(model.graph, inputs).found


@dataclass(eq=False)
class _Value:
    """What is known of a value; results of one node share it.

    Attributes:
        ways: in which inputs reach it.
        tensor: the constant that it is, maybe in another type, as onnx has it; else None.
        gate, candidate: whether it is what opens a gate of a cell, or what a cell takes up.
        gated: inputs that a gate has let through, as bits.
        padding: zeros before and behind the numbers that it was moved from.
        convolved: the convolution that it comes from, and zeros before and behind what that read; else None.
    """

    ways: Ways = field(default_factory=Ways)
    tensor: Any = None
    gate: bool = False
    candidate: bool = False
    gated: int = 0
    padding: tuple[int, int] = (0, 0)
    convolved: tuple[str, int, int] | None = None

    def numbers(self) -> list[int]:
        """A small constant of whole numbers as a list; empty for what is none."""
        tensor = self.tensor
        if tensor is None or tensor.external_data or not 0 <= np.prod(tensor.dims, dtype=float) <= FEW:
            return []
        try:
            found = numpy_helper.to_array(tensor)
        except (ValueError, TypeError, KeyError, AttributeError):  # its bytes are not what its sizes say
            return []
        return found.ravel().tolist() if found.dtype.kind in "iu" else []

    def dims(self) -> list[int]:
        """The sizes of a constant; empty for what is none."""
        return list(self.tensor.dims) if self.tensor is not None else []


class _Node:
    """A node with the values that it is given, and its attributes."""

    def __init__(self, node: Any, values: list[_Value]) -> None:
        self.op, self.name, self.outputs = node.op_type, node.name or next(iter(node.output), ""), list(node.output)
        self.values, self._attributes = values, {attribute.name: attribute for attribute in node.attribute}

    def attribute(self, name: str) -> Any:
        """What onnx has of an attribute; None where it is missing."""
        return self._attributes.get(name)

    def number(self, name: str) -> int:
        """A whole number among the attributes, or 0."""
        return int(self._attributes[name].i) if name in self._attributes else 0

    def numbers(self, name: str) -> list[int]:
        """A list of whole numbers among the attributes, or nothing."""
        return list(self._attributes[name].ints) if name in self._attributes else []


class _Pass:
    """The one pass, and what it knows of each value by name; of two with one name, the one that came last."""

    def __init__(self, graph: Any, inputs: Sequence[Port]) -> None:
        names = tuple(port.name for port in inputs)
        if missing := {*names} - {value.name for value in graph.input}:
            raise KeyError(*missing)
        self.found, self._values = Structure(names), dict[str, _Value]()
        self._floats = sum(1 << at for at, port in enumerate(inputs) if port.dtype.startswith("float"))
        for at, name in enumerate(names):
            bit = 1 << at
            self._values[name] = _Value(Ways(reach=bit, moved=bit, scaled=bit))
        for output, value in zip(graph.output, self._graph(graph, ""), strict=True):
            self.found.outputs[output.name] = value.ways

    def _of(self, name: str) -> _Value:
        return (self._values.get(name) if name else None) or _Value()

    def _graph(self, graph: Any, branch: str) -> list[_Value]:
        """Go through a graph, and return its results; `branch` is the If in one of whose branches it is, or ""."""
        for tensor in graph.initializer:
            self._values[tensor.name] = _Value(tensor=tensor)
        for each in graph.node:
            node = _Node(each, [self._of(name) for name in each.input])
            if node.op in ("Loop", "Scan") and node.attribute("body") is not None:
                self._loop(node, branch)
            elif held := subgraphs(each):
                self._branches(node, held, branch)
            else:
                self._step(node, branch)
        return [self._of(value.name) for value in graph.output]

    def _branches(self, node: _Node, held: list[Any], branch: str) -> None:
        """An If: what it returns is what either branch does."""
        results = [self._graph(graph, branch or node.name) for graph in held]
        for at, output in enumerate(node.outputs):
            ends = [found[at] for found in results if at < len(found)]
            self._values[output] = _passing([*ends, *node.values], ends)
        self.found.branching.update(self.found.among(_any(node.values, "reach")))

    def _loop(self, node: _Node, branch: str) -> None:
        """A Loop or Scan: what is carried enters the body, and what the body returns leaves it."""
        skipped = 2 if node.op == "Loop" else 0  # of the node and of its body: the count and the condition
        body, entering = node.attribute("body").g, [_Value()] * skipped + node.values[skipped:]
        for entered, value in zip(body.input, entering, strict=False):
            self._values[entered.name] = _passing([value], [value])
        ends = self._graph(body, branch)
        starts = node.values[skipped : max(len(node.values) - node.number("num_scan_inputs"), skipped)]
        reach = _any([*node.values, *ends], "reach")
        for at, output in enumerate(node.outputs):
            self._values[output] = _Value(Ways(reach, recurrent=_any(starts[at : at + 1], "scaled")))
        if starts:
            self._note(node, 0, bool(_any(starts, "reach") & self._floats), branch)

    def _step(self, node: _Node, branch: str) -> None:
        op, values = node.op, node.values
        result = _passing([] if op in SIZES else values, self._passed(op, values))
        if op == "Constant" and (constant := node.attribute("value")) is not None:
            result.tensor = constant.t
        elif op == "Cast":  # a table may be stored in another type
            result.tensor = values[0].tensor if values else None
        if op in SCATTERS and _any(values[SCATTERS[op] :][:1], "reach"):
            result.ways.written |= values[0].ways.moved
        if op in SCALES:
            result.ways.scaled |= _any(values, "scaled")
        if op == "Concat":
            _concat(values, result)
        self._values.update(dict.fromkeys(node.outputs, result))
        _cell(op, values, result)
        if op in RECURRENT:
            self._recurrent(node, branch)
        elif op in ("Gather", "Equal") and len(values) > 1:
            self._asked(node)
        elif op in ("Conv", "Slice", "Pad") and values:
            self._window(node, result)

    def _passed(self, op: str, values: list[_Value]) -> list[_Value]:
        """Those of a node's inputs whose numbers are the result's."""
        if op in MOVES:
            return [*values[:1], *(values[2:3] if op in ("ScatterElements", "ScatterND") else [])]
        if op == "Concat":
            return values
        if op == "Where":
            return values[1:]
        if op in GENTLE:  # something that no array of data reaches may be added: sizes, settings, zeros of them
            data = [value for value in values if value.ways.reach & self._floats]
            return data if len(data) == 1 else []
        return []

    def _recurrent(self, node: _Node, branch: str) -> None:
        given, reach = 0, _any(node.values, "reach")
        for place, output in zip(RECURRENT[node.op], node.outputs[1:], strict=False):
            start = node.values[place : place + 1]
            given |= _any(start, "reach")
            self._values[output] = _Value(Ways(reach, recurrent=_any(start, "scaled")))
        self._note(node, node.number("hidden_size"), bool(given), branch)

    def _note(self, node: _Node, hidden: int, given: bool, branch: str) -> None:
        said = node.attribute("direction")
        direction = said.s.decode("ascii", "replace") if said is not None else "forward"
        starts = "given" if given else "anew"
        self.found.recurrences.append(Recurrence(node.name, node.op, hidden, direction, starts, branch))

    def _asked(self, node: _Node) -> None:
        """Indices into tables, and numbers that settings are compared with."""
        one, two = node.values[:2]
        if node.op == "Gather":
            axis, dims = node.number("axis"), one.dims()
            if -len(dims) <= axis < len(dims):
                for name in self.found.among(two.ways.scaled):
                    self.found.rows[name] = min(self.found.rows.get(name, dims[axis]), dims[axis])
            return
        for value, other in ((one, two), (two, one)):
            for name in self.found.among(value.ways.moved):
                self.found.compared.setdefault(name, []).extend(other.numbers()[:8])

    def _window(self, node: _Node, result: _Value) -> None:
        """Convolutions along one axis, whose windows overlap what came before."""
        source, *more = node.values
        if node.op == "Pad":
            pads = node.numbers("pads") or (more[0].numbers() if more else [])
            if len(pads) >= 2 and len(pads) % 2 == 0:
                result.padding = source.padding[0] + pads[len(pads) // 2 - 1], source.padding[1] + pads[-1]
        elif node.op == "Slice" and source.convolved and len(more) > 1:
            convolution, before, behind = source.convolved
            if before == behind > 0 and more[1].numbers() == [-behind]:  # padded on both sides, cut on the right
                self.found.windows.append(Window(convolution, "", before, 1, True))
        elif node.op == "Conv" and more and len(dims := more[0].dims()) == 3:
            pads = [*node.numbers("pads"), 0, 0][:2]
            before, behind = source.padding[0] + pads[0], source.padding[1] + pads[1]
            stride = (node.numbers("strides") or [1])[0]
            needs = (dims[2] - 1) * (node.numbers("dilations") or [1])[0] + 1 - max(stride, 1)
            result.convolved = node.name, before, behind
            raw = self.found.among(source.ways.moved) if source.ways.moved == source.ways.reach else []
            if before > 0 and behind == 0 and needs > 0:
                self.found.windows.append(Window(node.name, "", min(before, needs), stride, True))
            elif len(raw) == 1 and before == 0 and needs > behind:
                self.found.windows.append(Window(node.name, raw[0], needs - behind, stride, False))


def _passing(inputs: Sequence[_Value], passed: Sequence[_Value]) -> _Value:
    """A value that all inputs reach, and that has the numbers of those that are passed on."""
    ways = Ways(_any(inputs, "reach"), **{kind: _any(passed, kind) for kind in PASSED})
    return replace(passed[0], ways=ways, tensor=None, convolved=None) if passed else _Value(ways)


def _concat(values: Sequence[_Value], result: _Value) -> None:
    """What stands beside an input in a window: where the window, or the part beside it, comes out, it moves on."""
    for at, value in enumerate(values[:BESIDE]):
        if value.ways.moved and value.ways.moved == value.ways.reach:
            for other in [*values[:at], *values[at + 1 : BESIDE]]:
                other.ways.beside |= value.ways.moved
            result.ways.beside |= value.ways.moved


def _cell(op: str, values: Sequence[_Value], result: _Value) -> None:
    """Gates, candidates, and what a gate lets through: the forms that cells of GRU and LSTM are written in."""
    gates, others = [value for value in values if value.gate], [value for value in values if not value.gate]
    if op in GATES:
        result.gate = True
    elif op in CANDIDATES or (op == "Mul" and gates and others and all(value.candidate for value in others)):
        result.candidate = True
    elif op == "Mul" and gates and others:
        result.gated = others[0].ways.scaled | others[0].gated
    elif op == "Sub" and len(values) == 2 and values[1].candidate:
        result.gated = values[0].ways.scaled
    elif op in ("Add", "Sum") and any(value.candidate for value in values):
        result.ways.cell |= next((value.gated for value in values if value.gated), 0)


def _any(values: Iterable[_Value], kind: str) -> int:
    """The inputs that reach one of these values in a way."""
    found = 0
    for value in values:
        found |= getattr(value.ways, kind)
    return found
