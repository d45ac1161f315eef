"""Reads facts about inputs and outputs from a graph's nodes, in one pass, without running it.

For each value the pass knows which inputs reach it, and in which way. A set of inputs is an integer: bit i stands for
input i, and one more bit stands for random numbers.
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
from txl_runtime.errors import CheckpointError, one_line

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
"""Operators that only move the numbers of their first input to other places."""
SIZES = frozenset(("Shape", "Size"))
GENTLE = frozenset(("Add", "Sub", "Mul", "Div", "Sum"))
"""Arithmetic operators; if only one operand depends on float data, the result is treated as that operand's numbers."""
SCALES = frozenset(("Mul", "Where", "Clip", "Min", "Max", "Mod"))
"""Operators through which a state passes when a flag resets it, or an index when it is clipped to a range."""
RANDOM = re.compile(r"Random(Normal|Uniform)(Like)?|Multinomial|Bernoulli")
JOINS, PRODUCTS = frozenset(("Concat", "Add", "Sum")), frozenset(("MatMul", "Gemm"))
"""`JOINS` are operators that combine a state with an input; `PRODUCTS` read a state by itself."""
MOST_ZEROS = 2**16
"""Maximum number of values of a constant that is compared with zero."""


class Ways(NamedTuple):
    """The inputs that reach a value, in three ways, each a set of bits.

    Attributes:
        reach: inputs whose values (not only sizes) influence it.
        moved: inputs whose numbers it contains, at other places or changed by `SCALES`.
        recurrent: if the value is a recurrent operator's last state, the inputs that are the operator's initial state.
    """

    reach: int = 0
    moved: int = 0
    recurrent: int = 0


@dataclass(frozen=True)
class Context:
    """A convolution over positions of an input that also needs earlier positions, which the caller has to supply.

    Attributes:
        node: the node's name.
        input: the input it reads.
        before: the number of positions that it needs before the new positions.
        step: the number of new positions per result (the stride).
    """

    node: str
    input: str
    before: int
    step: int


@dataclass
class Structure:
    """Facts about a graph that its nodes show.

    Attributes:
        names: the inputs; bit i stands for the i-th.
        kinds: facts about axes.
        carried: for an output that is a recurrent operator's last state, the inputs that are its initial state.
        contexts: convolutions that need earlier positions.
        rows: for an input of indices, the number of rows of the smallest constant table that it selects from.
        compared: for an input, the integers that nodes compare it with.
        branching: inputs that decide which branch of an If runs.
        random: operators that draw random numbers, and the outputs that depend on them.
        frozen: nodes that combine constant zeros with values that depend on inputs, with the operator and the shape of
            the zeros.
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
        """Return the names of the inputs in a set of bits."""
        return [name for at, name in enumerate(self.names) if bits >> at & 1]


def read_structure(graph: ir.Graph, inputs: Sequence[Port]) -> Structure:
    """Read a graph's nodes once, from inputs to outputs.

    Raises:
        CheckpointError: a constant or attribute in the graph is damaged.
    """
    try:
        return _Pass(graph, inputs).found
    except Exception as error:  # onnx-ir raises errors of many classes where a constant is not of the type it names
        raise CheckpointError(f"a part of the graph is damaged ({one_line(error)}); export the file again") from None


class _Pass:
    """Passes over a graph, and holds the facts that it found about each value."""

    def __init__(self, graph: ir.Graph, inputs: Sequence[Port]) -> None:
        ports, names = {str(value.name): value for value in graph.inputs}, tuple(port.name for port in inputs)
        self.found = structure = Structure(names, read_axes(graph, [ports[name] for name in names]))
        self._ways = {ports[name]: Ways(1 << at, 1 << at) for at, name in enumerate(names)}
        self._floats = sum(1 << at for at, port in enumerate(inputs) if port.dtype.startswith("float"))
        self._chance, self._drawn = 1 << len(inputs), dict[str, None]()
        ends = {str(value.name): end for value, end in zip(graph.outputs, self._graph(graph), strict=True)}
        structure.carried = {name: structure.among(end.recurrent) for name, end in ends.items() if end.recurrent}
        structure.random = [*self._drawn], [name for name, end in ends.items() if end.reach & self._chance]

    def _of(self, values: Iterable[ir.Value | None]) -> list[Ways]:
        return [Ways() if value is None else self._ways.get(value, Ways()) for value in values]

    def _graph(self, graph: ir.Graph) -> list[Ways]:
        """Pass over a graph; return facts about its outputs."""
        for node in graph:
            inputs, held = self._of(node.inputs), subgraphs(node)
            if node.op_type in ("Loop", "Scan") and held:
                self._loop(node, inputs, held[0])
            elif held:  # an If has the results of either branch
                decides = Ways(_any(inputs, "reach"))
                for output, *ends in zip(node.outputs, *map(self._graph, held), strict=False):
                    self._ways[output] = _passing([*ends, decides], ends)
                self.found.branching.update(self.found.among(decides.reach))
            else:
                self._step(node, inputs)
        return self._of(graph.outputs)

    def _loop(self, node: ir.Node, inputs: list[Ways], body: ir.Graph) -> None:
        """Pass over the body of a Loop or Scan: carried values enter it, and its results leave it."""
        skipped = 2 if node.op_type == "Loop" else 0  # a Loop begins with its count and its condition
        for entered, ways in zip(body.inputs, [Ways()] * skipped + inputs[skipped:], strict=False):
            self._ways[entered] = ways._replace(recurrent=0)
        ends, carried = self._graph(body), len(inputs) - (node.attributes.get_int("num_scan_inputs", 0) or 0)
        self._carry(node.outputs, inputs[skipped:carried], [*inputs, *ends])

    def _carry(self, outputs: Sequence[ir.Value], starts: list[Ways], inputs: list[Ways]) -> None:
        """Record the last states that a recurrent operator returns."""
        reach = _any(inputs, "reach")  # computed once: a Loop may have thousands of inputs and outputs
        for at, output in enumerate(outputs):
            self._ways[output] = Ways(reach, 0, _any(starts[at : at + 1], "moved"))

    def _step(self, node: ir.Node, inputs: list[Ways]) -> None:
        op, structure = node.op_type, self.found
        result = _passing([] if op in SIZES else inputs, self._passed(op, inputs))
        if op in SCALES:
            result = result._replace(moved=result.moved | _any(inputs, "moved"))
        elif RANDOM.fullmatch(op):
            result, self._drawn[op] = result._replace(reach=result.reach | self._chance), None
        self._ways.update(dict.fromkeys(node.outputs, result))
        if op in RECURRENT:
            self._carry(node.outputs[1 : 1 + RECURRENT[op]], inputs[5 : 5 + RECURRENT[op]], inputs)
        elif op in WHOLE:
            self._carry(node.outputs[1:], inputs[3:4], inputs)
        elif op == "Gather" and len(inputs) > 1:
            sizes, axis = _sizes(node.inputs[0]), node.attributes.get_int("axis", 0) or 0
            for name in structure.among(inputs[1].moved) if -len(sizes) <= axis < len(sizes) else ():
                structure.rows[name] = min(structure.rows.get(name, sizes[axis]), sizes[axis])
        elif op == "Equal" and len(inputs) > 1:
            for ways, other in zip(inputs, node.inputs[::-1], strict=True):
                for name in (
                    structure.among(ways.moved) if ways.moved.bit_count() <= FEW else ()
                ):  # a setting is one input, so more than FEW show none
                    known = structure.compared.setdefault(name, [])
                    known += (numbers(other) or [])[: 8 if len(known) < FEW else 0]
        elif op == "Conv" and len(inputs) > 1:
            self._context(node, inputs[0])
        elif op in PRODUCTS or (op in JOINS and any(ways.reach for ways in inputs)):
            for zeros in filter(None, map(_zeros, node.inputs[:1] if op in PRODUCTS else node.inputs)):
                structure.frozen[name_of(node)] = op, zeros

    def _passed(self, op: str, inputs: list[Ways]) -> list[Ways]:
        """Return facts about those inputs of a node whose numbers its result contains."""
        if op in MOVES:
            return inputs[:1]
        if op in ("Concat", "Where"):
            return inputs[1:] if op == "Where" else inputs
        if op in GENTLE:  # the other operands depend on no float data: sizes, settings, or zeros
            data = [ways for ways in inputs if ways.reach & self._floats]
            return data if len(data) == 1 else []
        return []

    def _context(self, node: ir.Node, source: Ways) -> None:
        """Record a convolution along one axis of one input if it needs positions before the new positions."""
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
    """Return the shape of a constant, looking through Casts; () for anything else."""
    for _ in range(FEW):
        if value is not None and (maker := value.producer()) is not None and maker.op_type == "Cast":
            value = maker.inputs[0]
    return () if value is None or value.const_value is None else tuple(value.const_value.shape.numpy())


def _zeros(value: ir.Value | None) -> tuple[int, ...]:
    """Return the shape of a constant that is all zeros and has at least two axes; () for anything else."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or not tensor.dtype.is_floating_point() or not 1 < tensor.size <= MOST_ZEROS:
        return ()
    return tuple(tensor.shape.numpy()) if len(tensor.shape) > 1 and not np.any(tensor.numpy()) else ()


def _passing(inputs: Iterable[Ways], passed: Sequence[Ways]) -> Ways:
    """Return facts about a value that depends on all of `inputs` and contains the numbers of `passed`."""
    return Ways(_any(inputs, "reach"), _any(passed, "moved"), _any(passed, "recurrent"))


def _any(ways: Iterable[Ways], kind: str) -> int:
    """Return the union of the sets of inputs that reach these values in one way."""
    return reduce(or_, (getattr(each, kind) for each in ways), 0)
