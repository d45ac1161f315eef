"""What the nodes of a graph say of its inputs and outputs, without running it: one pass from the inputs to the outputs.

Of every value it is known which inputs reach it, and in which way, as the bits of a whole number: bit i is input i.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import AttributeProto, TensorProto, numpy_helper

from txl_export.families.graph.take.reading import Port

RECURRENT = {"LSTM": 2, "GRU": 1, "RNN": 1}
"""Operators that carry states along a sequence, and how many, which start from their sixth input and the next one."""
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
SCATTERS = {"ScatterElements": 1, "ScatterND": 1, "TensorScatter": 2}
"""Operators that write into their first input, and the input that says where."""


@dataclass(eq=False)
class Value:
    """What is known of a value; results of one node share it. How inputs reach it, each as bits:

    Attributes:
        reach: at all, by value and not by size.
        moved: some of their numbers are numbers of it, at other places.
        scaled: moved, or changed by `SCALES`.
        written: moved, and something is written among them at a place that is computed.
        beside: they stand beside it in a Concat, so that the window of the two may be what moves on.
        recurrent: they are the first state of a recurrent operator, and this its last one.
        cell: they are carried over by a gate, and a bounded candidate is added, as cells of GRU and LSTM do.
        gated: a gate has let them through.
        gate, candidate: whether it is what opens a gate of a cell, or what a cell takes up.
        tensor: the constant that it is, maybe in another type, as onnx has it; else an empty one.
        padding: zeros before and behind the numbers that it was moved from.
        convolved: the convolution that it comes from, and zeros before and behind what that read; else None.
    """

    reach: int = 0
    moved: int = 0
    scaled: int = 0
    written: int = 0
    beside: int = 0
    recurrent: int = 0
    cell: int = 0
    gated: int = 0
    gate: bool = False
    candidate: bool = False
    tensor: Any = field(default_factory=TensorProto)
    padding: tuple[int, int] = (0, 0)
    convolved: tuple[str, int, int] | None = None

    def numbers(self) -> list[int]:
        """A small constant of whole numbers as a list; empty for what is none."""
        if self.tensor.external_data or not 0 <= np.prod(self.tensor.dims, dtype=float) <= FEW:
            return []
        try:
            found = numpy_helper.to_array(self.tensor)
        except (ValueError, TypeError, KeyError, AttributeError):  # its bytes are not what its sizes say
            return []
        return found.ravel().tolist() if found.dtype.kind in "iu" else []


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
        outputs: what is known of each output.
        recurrences, windows: inside the graph.
        rows: of an input of indices, how many rows the smallest constant table has that it selects from.
        compared: of an input, the whole numbers that it is compared with.
        branching: inputs that decide which branch of an If runs.
    """

    names: tuple[str, ...]
    outputs: dict[str, Value] = field(default_factory=dict)
    recurrences: list[Recurrence] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    compared: dict[str, list[int]] = field(default_factory=dict)
    branching: set[str] = field(default_factory=set)

    def among(self, bits: int) -> list[str]:
        """The inputs of these bits."""
        return [name for at, name in enumerate(self.names) if bits >> at & 1]


def read_structure(model: Any, inputs: Sequence[Port]) -> Structure:
    """Go through a graph once.

    Raises:
        KeyError: it lacks one of the inputs.
    """
    return _Pass(model.graph, inputs).found


class _Pass:
    """The one pass, and what it knows of each value by name; of two with one name, the one that came last."""

    def __init__(self, graph: Any, inputs: Sequence[Port]) -> None:
        names = tuple(port.name for port in inputs)
        if missing := {*names} - {value.name for value in graph.input}:
            raise KeyError(*missing)
        self.found = Structure(names)
        self._floats = sum(1 << at for at, port in enumerate(inputs) if port.dtype.startswith("float"))
        self._values = {name: Value(1 << at, 1 << at, 1 << at) for at, name in enumerate(names)}
        ends = self._graph(graph, "")
        self.found.outputs = {output.name: end for output, end in zip(graph.output, ends, strict=True)}

    def _of(self, names: Iterable[str]) -> list[Value]:
        return [(self._values.get(name) if name else None) or Value() for name in names]

    def _graph(self, graph: Any, branch: str) -> list[Value]:
        """Go through a graph, and return its results; `branch` is the If in one of whose branches it is, or ""."""
        self._values.update({tensor.name: Value(tensor=tensor) for tensor in graph.initializer})
        for node in graph.node:
            values, held = self._of(node.input), subgraphs(node)
            if node.op_type in ("Loop", "Scan") and held:
                self._loop(node, values, held[0], branch)
            elif held:
                self._branches(node, values, held, branch)
            else:
                self._step(node, values, branch)
        return self._of(output.name for output in graph.output)

    def _branches(self, node: Any, values: list[Value], held: list[Any], branch: str) -> None:
        """An If: what it returns is what either branch does."""
        results = [self._graph(graph, branch or _name(node)) for graph in held]
        for at, output in enumerate(node.output):
            ends = [found[at] for found in results if at < len(found)]
            self._values[output] = _passing([*ends, *values], ends)
        self.found.branching.update(self.found.among(_any(values, "reach")))

    def _loop(self, node: Any, values: list[Value], body: Any, branch: str) -> None:
        """A Loop or Scan: what is carried enters the body, and what the body returns leaves it."""
        skipped = 2 if node.op_type == "Loop" else 0  # of the node and of its body: the count and the condition
        for entered, value in zip(body.input, [Value()] * skipped + values[skipped:], strict=False):
            self._values[entered.name] = _passing([value], [value])
        ends = self._graph(body, branch)
        starts = values[skipped : max(len(values) - _attribute(node, "num_scan_inputs").i, skipped)]
        self._carried(node, node.output, starts, [*values, *ends], branch)

    def _carried(self, node: Any, names: Sequence[str], starts: list[Value], inputs: list[Value], branch: str) -> None:
        """What a recurrence returns as the last states, and that there is one."""
        for at, name in enumerate(names):
            self._values[name] = Value(_any(inputs, "reach"), recurrent=_any(starts[at : at + 1], "scaled"))
        if starts:
            direction = _attribute(node, "direction").s.decode("ascii", "replace") or "forward"
            begun, size = "given" if _any(starts, "reach") else "anew", _attribute(node, "hidden_size").i
            self.found.recurrences.append(Recurrence(_name(node), node.op_type, size, direction, begun, branch))

    def _step(self, node: Any, values: list[Value], branch: str) -> None:
        op = node.op_type
        result = _passing([] if op in SIZES else values, self._passed(op, values))
        if op == "Constant" and (constant := _attribute(node, "value")).HasField("t"):
            result.tensor = constant.t
        elif op == "Cast" and values:  # a table may be stored in another type
            result.tensor = values[0].tensor
        elif op == "Concat":  # where the window, or the part beside what was given, comes out, it moves on
            raw = _any([value for value in values if value.moved == value.reach], "moved")
            for value in (*values, result):
                value.beside |= raw
        elif op in SCATTERS and _any(values[SCATTERS[op] :][:1], "reach"):
            result.written |= values[0].moved
        elif op in SCALES:
            result.scaled |= _any(values, "scaled")
        _cell(op, values, result)
        self._values.update(dict.fromkeys(node.output, result))
        if op in RECURRENT:
            count = RECURRENT[op]
            starts = [*values, *[Value()] * 7][5 : 5 + count]
            self._carried(node, node.output[1 : 1 + count], starts, values, branch)
        elif op in ("Gather", "Equal") and len(values) > 1:
            self._asked(node, *values[:2])
        elif op in ("Conv", "Slice", "Pad") and values:
            self._window(node, values, result)

    def _passed(self, op: str, values: list[Value]) -> list[Value]:
        """Those of a node's inputs whose numbers are the result's."""
        if op in MOVES:
            return values[:1]
        if op in ("Concat", "Where"):
            return values[1:] if op == "Where" else values
        if op in GENTLE:  # something that no array of data reaches may be added: sizes, settings, zeros of them
            data = [value for value in values if value.reach & self._floats]
            return data if len(data) == 1 else []
        return []

    def _asked(self, node: Any, one: Value, two: Value) -> None:
        """Indices into tables, and numbers that settings are compared with."""
        if node.op_type == "Gather":
            axis, dims = _attribute(node, "axis").i, one.tensor.dims
            if -len(dims) <= axis < len(dims):
                for name in self.found.among(two.scaled):
                    self.found.rows[name] = min(self.found.rows.get(name, dims[axis]), dims[axis])
            return
        for value, other in ((one, two), (two, one)):
            for name in self.found.among(value.moved):
                self.found.compared.setdefault(name, []).extend(other.numbers()[:8])

    def _window(self, node: Any, values: list[Value], result: Value) -> None:
        """Convolutions along one axis, whose windows overlap what came before."""
        source, more = (*values, Value())[:2]
        pads = [*_attribute(node, "pads").ints]
        if node.op_type == "Pad":
            pads = pads or more.numbers()
            if pads and len(pads) % 2 == 0:
                result.padding = source.padding[0] + pads[len(pads) // 2 - 1], source.padding[1] + pads[-1]
        elif node.op_type == "Slice":
            convolution, before, behind = source.convolved or ("", 0, 0)
            if before == behind > 0 and [value.numbers() for value in values[2:3]] == [[-behind]]:  # cut on the right
                self.found.windows.append(Window(convolution, "", before, 1, True))
        elif len(dims := more.tensor.dims) == 3:
            before, behind = (own + pad for own, pad in zip(source.padding, [*pads, 0, 0], strict=False))
            stride, dilation = ([*_attribute(node, name).ints, 1][0] for name in ("strides", "dilations"))
            needs = (dims[2] - 1) * dilation + 1 - max(stride, 1)
            result.convolved = _name(node), before, behind
            raw = self.found.among(source.moved) if source.moved == source.reach else []
            if before > 0 and behind == 0 and needs > 0:
                self.found.windows.append(Window(_name(node), "", min(before, needs), stride, True))
            elif len(raw) == 1 and before == 0 and needs > behind:
                self.found.windows.append(Window(_name(node), raw[0], needs - behind, stride, False))


def subgraphs(node: Any) -> list[Any]:
    """The graphs that a node holds, such as the branches of an If."""
    held = [attribute for attribute in node.attribute if attribute.HasField("g") or attribute.graphs]
    return [graph for one in held for graph in [*([one.g] if one.HasField("g") else []), *one.graphs]]


def _attribute(node: Any, name: str) -> Any:
    """What onnx has of an attribute; an empty one where it is missing."""
    return next((one for one in node.attribute if one.name == name), AttributeProto())


def _name(node: Any) -> str:
    return node.name or next(iter(node.output), "")


def _passing(inputs: Sequence[Value], passed: Sequence[Value]) -> Value:
    """A value that all inputs reach, and that has the numbers of those that are passed on."""
    ways: dict[str, Any] = {kind: _any(passed, kind) for kind in PASSED}
    return replace((*passed, Value())[0], reach=_any(inputs, "reach"), tensor=TensorProto(), convolved=None, **ways)


def _cell(op: str, values: Sequence[Value], result: Value) -> None:
    """Gates, candidates, and what a gate lets through: the forms that cells of GRU and LSTM are written in."""
    gates, others = [value for value in values if value.gate], [value for value in values if not value.gate]
    if op in GATES:
        result.gate = True
    elif op in CANDIDATES or (op == "Mul" and gates and others and all(value.candidate for value in others)):
        result.candidate = True
    elif op == "Mul" and gates and others:
        result.gated = others[0].scaled | others[0].gated
    elif op == "Sub" and len(values) == 2 and values[1].candidate:
        result.gated = values[0].scaled
    elif op in ("Add", "Sum") and any(value.candidate for value in values):
        result.cell |= next((value.gated for value in values if value.gated), 0)


def _any(values: Iterable[Value], kind: str) -> int:
    """The inputs that reach one of these values in a way."""
    found = 0
    for value in values:
        found |= getattr(value, kind)
    return found
