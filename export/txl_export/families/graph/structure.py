"""What the nodes of a graph say of its inputs and outputs, without running it: one pass from the inputs to the outputs.

Of every value it is known which inputs reach it, and in which way, as the bits of a whole number: bit i is input i.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from txl_export.families.graph.flat import NONE, Flat, Node
from txl_export.families.graph.reading import Port

RECURRENT = {"LSTM": (5, 6), "GRU": (5,), "RNN": (5,)}
"""Operators that carry a state along a sequence, and which of their inputs it starts from."""
MOVES = frozenset(
    re.findall(
        r"\w+",
        "Identity Reshape Squeeze Unsqueeze Transpose Slice Split Flatten Expand Tile Cast Gather GatherND "
        "GatherElements Pad DepthToSpace SpaceToDepth Dropout ReverseSequence Compress Trilu ScatterElements "
        "ScatterND TensorScatter Enter",
    )
)
"""Operators whose first input's numbers are the result's, at other places."""
SIZES = frozenset(("Shape", "Size"))
GENTLE = frozenset(("Add", "Sub", "Mul", "Div", "Sum"))
"""Operators that may add to a number, or multiply it by, what is no data at all."""
SCALES = frozenset(("Mul", "Where", "Clip", "Min", "Max", "Mod"))
"""Operators that a state passes which a flag resets, and an index that is kept in range."""
GATES, CANDIDATES = frozenset(("Sigmoid", "HardSigmoid")), frozenset(("Tanh", "Softsign", "Relu"))
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
    return _Pass(Flat(model), inputs).found


class _Pass:
    """The one pass, and what it knows of each value."""

    def __init__(self, flat: Flat, inputs: Sequence[Port]) -> None:
        names = tuple(port.name for port in inputs)
        self._flat, self.found = flat, Structure(names)
        self._ways: dict[int, Ways] = {NONE: Ways()}
        self._gate, self._candidate = set[int](), set[int]()
        self._gated: dict[int, int] = {}
        self._padding: dict[int, tuple[int, int]] = {}
        self._convolved: dict[int, tuple[Node, int, int]] = {}
        self._origin: dict[int, set[int]] = {}
        self._rules: dict[str, Callable[[Node, list[Ways]], None]] = {
            **dict.fromkeys(RECURRENT, self._recurrent),
            **dict.fromkeys(("Loop", "Scan"), self._loop),
            **dict.fromkeys(("Gather", "Equal", "Either"), self._asked),
            **dict.fromkeys(("Conv", "Slice", "Pad"), self._window),
        }
        self._floats = sum(1 << at for at, port in enumerate(inputs) if port.dtype.startswith("float"))
        for at, name in enumerate(names):
            bit = 1 << at
            self._ways[flat.inputs[name]] = Ways(reach=bit, moved=bit, scaled=bit)
        for node in flat.nodes:
            self._step(node)
        for name, value in flat.outputs.items():
            ways = Ways(**vars(self._of(value)))
            for origin in self._origin.get(value, ()):  # what became known of them later
                ways.beside |= self._of(origin).beside
            self.found.outputs[name] = ways

    def _of(self, value: int) -> Ways:
        return self._ways.get(value) or self._ways[NONE]

    def _step(self, node: Node) -> None:
        ways, op = [self._of(value) for value in node.inputs], node.op
        result = Ways(reach=0 if op in SIZES else _any(ways, "reach"))
        passed = self._passed(node, ways)
        for way in passed:
            for kind in PASSED:
                setattr(result, kind, getattr(result, kind) | getattr(way, kind))
        if op in SCATTERS and len(ways) > SCATTERS[op] and ways[SCATTERS[op]].reach:
            result.written |= ways[0].moved
        if op in SCALES:
            result.scaled |= _any(ways, "scaled")
        if op == "Concat":
            self._concat(node, result, ways)
        for value in node.outputs:
            self._ways[value] = result
        if passed:
            self._follow(node)
        self._cells(node, ways)
        if node.outputs and (rule := self._rules.get(op)):
            rule(node, ways)

    def _passed(self, node: Node, ways: list[Ways]) -> list[Ways]:
        """Those of a node's inputs whose numbers are the result's."""
        if node.op in MOVES:
            return [*ways[:1], *(ways[2:3] if node.op in ("ScatterElements", "ScatterND") else [])]
        if node.op == "Either":
            return ways[: node.data]
        if node.op == "Concat":
            return ways
        if node.op == "Where":
            return ways[1:]
        if node.op in GENTLE:  # something that no array of data reaches may be added: sizes, settings, zeros of them
            data = [way for way in ways if way.reach & self._floats]
            return data if len(data) == 1 else []
        return []

    def _concat(self, node: Node, result: Ways, ways: list[Ways]) -> None:
        """What stands beside an input in a window: where the window, or the part beside it, comes out, it moves on."""
        for at, way in enumerate(ways[:BESIDE]):
            if way.moved and way.moved == way.reach:
                for other, value in enumerate(node.inputs[:BESIDE]):
                    if other != at:
                        for origin in {value, *self._origin.get(value, ())}:
                            self._of(origin).beside |= way.moved
                result.beside |= way.moved

    def _follow(self, node: Node) -> None:
        """What is known of a value's numbers is known where they are moved to."""
        source = node.inputs[0] if node.inputs else NONE
        for value in node.outputs:
            self._origin[value] = {source, *list(self._origin.get(source, ()))[:8]}
            for known in (self._gate, self._candidate):
                if source in known:
                    known.add(value)
            for table in (self._gated, self._padding):
                if source in table:
                    table[value] = table[source]  # type: ignore[assignment]

    def _cells(self, node: Node, ways: list[Ways]) -> None:
        """Gates, candidates, and what a gate lets through: the forms that cells of GRU and LSTM are written in."""
        op, inputs, outputs = node.op, node.inputs, node.outputs
        gates = [value for value in inputs if value in self._gate]
        others = [value for value in inputs if value not in self._gate]
        if op in GATES or (op == "Sub" and len(inputs) == 2 and gates == [inputs[1]] and not ways[0].reach):
            self._gate.update(outputs)
        elif op in CANDIDATES or (op == "Mul" and gates and others and all(o in self._candidate for o in others)):
            self._candidate.update(outputs)
        elif op == "Mul" and gates and others:
            for output in outputs:
                self._gated[output] = self._of(others[0]).scaled | self._gated.get(others[0], 0)
        elif op == "Sub" and len(inputs) == 2 and inputs[1] in self._candidate:
            self._gated.update(dict.fromkeys(outputs, ways[0].scaled))
        elif op in ("Add", "Sum"):
            through = [value for value in inputs if self._gated.get(value)]
            if through and any(value in self._candidate for value in inputs):
                for output in outputs:
                    self._of(output).cell |= self._gated[through[0]]

    def _recurrent(self, node: Node, ways: list[Ways]) -> None:
        given = 0
        for place, output in zip(RECURRENT[node.op], node.outputs[1:], strict=False):
            start = ways[place] if place < len(ways) else self._ways[NONE]
            given |= start.reach
            self._ways[output] = Ways(reach=_any(ways, "reach"), recurrent=start.scaled)
        direction = node.attributes["direction"].s.decode("ascii", "replace") if "direction" in node.attributes else ""
        self._note(node, node.number("hidden_size"), direction or "forward", bool(given))

    def _loop(self, node: Node, ways: list[Ways]) -> None:
        first = 2 if node.op == "Loop" else 0
        starts = ways[first : first + node.data]
        for start, output in zip(starts, node.outputs, strict=False):
            self._ways[output] = Ways(reach=_any(ways, "reach"), recurrent=start.scaled)
        if node.data:
            self._note(node, 0, "forward", any(start.reach & self._floats for start in starts))

    def _note(self, node: Node, hidden: int, direction: str, given: bool) -> None:
        starts = "given" if given else "anew"
        self.found.recurrences.append(Recurrence(node.name, node.op, hidden, direction, starts, node.branch))

    def _asked(self, node: Node, ways: list[Ways]) -> None:
        """Indices into tables, numbers that settings are compared with, and what decides between branches."""
        if node.op == "Gather" and len(node.inputs) > 1:
            table, axis = node.inputs[0], node.number("axis")
            origins = (table, *self._origin.get(table, ()))  # a table may be stored in another type
            dims = next((found for value in origins if (found := self._flat.dims(value))), [])
            if dims and -len(dims) <= axis < len(dims):
                for name in self.found.among(ways[1].scaled):
                    self.found.rows[name] = min(self.found.rows.get(name, dims[axis]), dims[axis])
        elif node.op == "Equal" and len(node.inputs) == 2:
            for way, other in zip(ways, node.inputs[::-1], strict=True):
                for name in self.found.among(way.moved):
                    self.found.compared.setdefault(name, []).extend(self._flat.numbers(other)[:8])
        elif node.op == "Either":
            self.found.branching.update(self.found.among(_any(ways[node.data :], "reach")))

    def _window(self, node: Node, ways: list[Ways]) -> None:
        """Convolutions along one axis, whose windows overlap what came before."""
        source = node.inputs[0] if node.inputs else NONE
        if node.op == "Pad":
            pads = node.numbers("pads") or (self._flat.numbers(node.inputs[1]) if len(node.inputs) > 1 else [])
            if len(pads) >= 2 and len(pads) % 2 == 0:
                before, behind = self._padding.get(source, (0, 0))
                self._padding[node.outputs[0]] = (before + pads[len(pads) // 2 - 1], behind + pads[-1])
        elif node.op == "Slice" and source in self._convolved and len(node.inputs) > 2:
            convolution, before, behind = self._convolved[source]
            cut = self._flat.numbers(node.inputs[2])
            if before == behind > 0 and cut == [-behind]:  # padded on both sides, cut on the right
                self.found.windows.append(Window(convolution.name, "", before, 1, True))
        elif node.op == "Conv" and len(node.inputs) > 1 and len(dims := self._flat.dims(node.inputs[1])) == 3:
            pads = [*node.numbers("pads"), 0, 0][:2]
            more = self._padding.get(source, (0, 0))
            before, behind = more[0] + pads[0], more[1] + pads[1]
            stride = (node.numbers("strides") or [1])[0]
            reads = (dims[2] - 1) * (node.numbers("dilations") or [1])[0] + 1
            self._convolved[node.outputs[0]] = node, before, behind
            raw = self.found.among(ways[0].moved) if ways[0].moved == ways[0].reach else []
            needs = reads - max(stride, 1)
            if before > 0 and behind == 0 and needs > 0:
                self.found.windows.append(Window(node.name, "", min(before, needs), stride, True))
            elif len(raw) == 1 and before == 0 and needs > behind:
                self.found.windows.append(Window(node.name, raw[0], needs - behind, stride, False))


def _any(ways: list[Ways], kind: str) -> int:
    found = 0
    for way in ways:
        found |= getattr(way, kind)
    return found
