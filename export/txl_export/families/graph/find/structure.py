"""Read what nodes say of a graph's inputs and outputs, without running it: one pass from the inputs to the outputs.

Of every value it is known which inputs reach it, and in which way, as the bits of a whole number: bit i is input i, and
the bit behind the last input is chance.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from txl_export.families.graph.find.axes import Kinds, read_axes
from txl_export.families.graph.find.nodes import FEW, RECURRENT, name_of, numbers, subgraphs
from txl_export.families.graph.take.reading import Port
from txl_export.families.graph.take.worker import WHOLE

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
RANDOM = re.compile(r"Random(Normal|Uniform)(Like)?|Multinomial|Bernoulli")
JOINS, PRODUCTS = frozenset(("Concat", "Add", "Sum")), frozenset(("MatMul", "Gemm"))
"""Operators that join a state to an input, and those that take it up by itself."""
MOST_ZEROS = 2**16
"""Numbers of a constant that are looked at before it is said to be zeros."""


class Ways(NamedTuple):
    """The inputs that reach a value, by the way, each as bits.

    Attributes:
        reach: at all, by value and not by size.
        moved: its numbers are theirs, at other places, or changed by `SCALES`.
        recurrent: they are the first state of a recurrent operator, and this its last one.
    """

    reach: int = 0
    moved: int = 0
    recurrent: int = 0


@dataclass(frozen=True)
class Context:
    """A convolution over positions of an input that reads ones before those that are new, as far as the graph says.

    Attributes:
        node: its name.
        input: what it reads.
        before: positions that it needs before the new ones.
        step: new positions that one of its results stands for.
    """

    node: str
    input: str
    before: int
    step: int


@dataclass
class Structure:
    """The findings of the pass.

    Attributes:
        names: of the inputs; bit i is the i-th.
        kinds: what the nodes say of axes.
        carried: of an output, the inputs that a recurrent operator makes it of.
        contexts: inside the graph.
        rows: of an input of indices, how many rows the smallest constant table has that it selects from.
        compared: of an input, the whole numbers that it is compared with.
        branching: inputs that decide which branch of an If runs.
        random: operators that draw numbers, and the outputs that these reach.
        frozen: nodes that join zeros to what an input reaches, with the operator and the sizes of the zeros.
    """

    names: tuple[str, ...]
    kinds: Kinds
    carried: dict[str, list[str]] = field(default_factory=dict)
    contexts: list[Context] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    compared: dict[str, list[int]] = field(default_factory=dict)
    branching: set[str] = field(default_factory=set)
    random: tuple[list[str], list[str]] = ([], [])
    frozen: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def among(self, bits: int) -> list[str]:
        """The inputs of these bits."""
        return [name for at, name in enumerate(self.names) if bits >> at & 1]


def read_structure(graph: ir.Graph, inputs: Sequence[Port]) -> Structure:
    """Go through a graph once.

    Raises:
        KeyError: it lacks one of the inputs.
    """
    return _Pass(graph, inputs).found


class _Pass:
    """The one pass, and what it knows of each value."""

    def __init__(self, graph: ir.Graph, inputs: Sequence[Port]) -> None:
        ports, names = {str(value.name): value for value in graph.inputs}, tuple(port.name for port in inputs)
        self.found = found = Structure(names, read_axes(graph, [ports[name] for name in names]))
        self._ways = {ports[name]: Ways(1 << at, 1 << at) for at, name in enumerate(names)}
        self._floats = sum(1 << at for at, port in enumerate(inputs) if port.dtype.startswith("float"))
        self._chance, self._drawn = 1 << len(inputs), dict[str, None]()
        ends = {str(value.name): end for value, end in zip(graph.outputs, self._graph(graph), strict=True)}
        found.carried = {name: found.among(end.recurrent) for name, end in ends.items() if end.recurrent}
        found.random = [*self._drawn], [name for name, end in ends.items() if end.reach & self._chance]

    def _of(self, values: Iterable[ir.Value | None]) -> list[Ways]:
        return [Ways() if value is None else self._ways.get(value, Ways()) for value in values]

    def _graph(self, graph: ir.Graph) -> list[Ways]:
        """Go through a graph, and return its results."""
        for node in graph:
            given, held = self._of(node.inputs), subgraphs(node)
            if node.op_type in ("Loop", "Scan") and held:
                self._loop(node, given, held[0])
            elif held:  # an If: what it returns is what either branch does
                decides = Ways(_any(given, "reach"))
                for output, *ends in zip(node.outputs, *map(self._graph, held), strict=False):
                    self._ways[output] = _passing([*ends, decides], ends)
                self.found.branching.update(self.found.among(decides.reach))
            else:
                self._step(node, given)
        return self._of(graph.outputs)

    def _loop(self, node: ir.Node, given: list[Ways], body: ir.Graph) -> None:
        """A Loop or Scan: what is carried enters the body, and what the body returns leaves it."""
        skipped = 2 if node.op_type == "Loop" else 0  # of the node and of its body: the count and the condition
        for entered, ways in zip(body.inputs, [Ways()] * skipped + given[skipped:], strict=False):
            self._ways[entered] = ways._replace(recurrent=0)
        ends, carried = self._graph(body), len(given) - (node.attributes.get_int("num_scan_inputs", 0) or 0)
        self._carry(node.outputs, given[skipped:carried], [*given, *ends])

    def _carry(self, outputs: Sequence[ir.Value], starts: list[Ways], given: list[Ways]) -> None:
        """Note the last states that a recurrence returns."""
        reach = _any(given, "reach")  # once: a Loop may have as many inputs and outputs as its file has room for
        for at, output in enumerate(outputs):
            self._ways[output] = Ways(reach, 0, _any(starts[at : at + 1], "moved"))

    def _step(self, node: ir.Node, given: list[Ways]) -> None:
        op, found = node.op_type, self.found
        result = _passing([] if op in SIZES else given, self._passed(op, given))
        if op in SCALES:
            result = result._replace(moved=result.moved | _any(given, "moved"))
        elif RANDOM.fullmatch(op):
            result, self._drawn[op] = result._replace(reach=result.reach | self._chance), None
        self._ways.update(dict.fromkeys(node.outputs, result))
        if op in RECURRENT:
            self._carry(node.outputs[1 : 1 + RECURRENT[op]], given[5 : 5 + RECURRENT[op]], given)
        elif op in WHOLE:
            self._carry(node.outputs[1:], given[3:4], given)
        elif op == "Gather" and len(given) > 1:
            sizes, axis = _sizes(node.inputs[0]), node.attributes.get_int("axis", 0) or 0
            for name in found.among(given[1].moved) if -len(sizes) <= axis < len(sizes) else ():
                found.rows[name] = min(found.rows.get(name, sizes[axis]), sizes[axis])
        elif op == "Equal" and len(given) > 1:
            for ways, other in zip(given, node.inputs[::-1], strict=True):
                for name in found.among(ways.moved) if ways.moved.bit_count() <= FEW else ():  # a setting is one input
                    known = found.compared.setdefault(name, [])
                    known += (numbers(other) or [])[: 8 if len(known) < FEW else 0]
        elif op == "Conv" and len(given) > 1:
            self._context(node, given[0])
        elif op in PRODUCTS or (op in JOINS and any(ways.reach for ways in given)):
            for zeros in filter(None, map(_zeros, node.inputs[:1] if op in PRODUCTS else node.inputs)):
                found.frozen[name_of(node)] = op, zeros

    def _passed(self, op: str, given: list[Ways]) -> list[Ways]:
        """Those of a node's inputs whose numbers are the result's."""
        if op in MOVES:
            return given[:1]
        if op in ("Concat", "Where"):
            return given[1:] if op == "Where" else given
        if op in GENTLE:  # something that no array of data reaches may be added: sizes, settings, zeros of them
            data = [ways for ways in given if ways.reach & self._floats]
            return data if len(data) == 1 else []
        return []

    def _context(self, node: ir.Node, source: Ways) -> None:
        """A convolution along one axis of an input alone, whose windows overlap what came before."""
        sizes, value = _sizes(node.inputs[1]), node.inputs[0]
        if len(sizes) != 3 or source.moved != source.reach or source.reach.bit_count() != 1:
            return
        pads = [*node.attributes.get_ints("pads", (0, 0))]
        for _ in range(FEW):
            if value is None or (maker := value.producer()) is None:
                break
            more = numbers((*maker.inputs, None)[1]) if maker.op_type == "Pad" else None
            if more and len(more) % 2 == 0:
                pads = [pads[0] + more[len(more) // 2 - 1], pads[1] + more[-1]]
            value = maker.inputs[0] if maker.inputs else None
        stride, dilation = ([*node.attributes.get_ints(name, ()), 1][0] for name in ("strides", "dilations"))
        needs = (sizes[2] - 1) * dilation + 1 - max(stride, 1) - pads[1]
        if pads[0] == 0 and needs > 0:
            self.found.contexts.append(Context(name_of(node), self.found.among(source.moved)[0], needs, stride))


def _sizes(value: ir.Value | None) -> tuple[int, ...]:
    """The sizes of a constant, which may be stored in another type; () of anything else."""
    for _ in range(FEW):
        if value is not None and (maker := value.producer()) is not None and maker.op_type == "Cast":
            value = maker.inputs[0]
    return () if value is None or value.const_value is None else tuple(value.const_value.shape.numpy())


def _zeros(value: ir.Value | None) -> tuple[int, ...]:
    """The sizes of a constant of several zeros with several axes; () of anything else."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or not tensor.dtype.is_floating_point() or not 1 < tensor.size <= MOST_ZEROS:
        return ()
    return tuple(tensor.shape.numpy()) if len(tensor.shape) > 1 and not np.any(tensor.numpy()) else ()


def _passing(given: Iterable[Ways], passed: Sequence[Ways]) -> Ways:
    """A value that all inputs reach, and that has the numbers of those that are passed on."""
    return Ways(_any(given, "reach"), _any(passed, "moved"), _any(passed, "recurrent"))


def _any(ways: Iterable[Ways], kind: str) -> int:
    """The inputs that reach one of these values in a way."""
    return reduce(or_, (getattr(each, kind) for each in ways), 0)
