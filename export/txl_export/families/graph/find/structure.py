"""What the nodes of a graph say of its inputs and outputs, without running it: one pass from the inputs to the outputs.

Of every value it is known which inputs reach it, and in which way, as the bits of a whole number: bit i is input i, and
the bit behind the last input is chance.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from txl_export.families.graph.find.axes import Kinds, numbers, read_axes
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
RANDOM = frozenset(
    re.findall(r"\w+", "RandomNormal RandomNormalLike RandomUniform RandomUniformLike Multinomial Bernoulli")
)
JOINS, PRODUCTS = frozenset(("Concat", "Add", "Sum")), frozenset(("MatMul", "Gemm"))
"""Operators that join a state to an input, and those that take it up by itself."""
MOST_ZEROS = 2**16
"""Numbers of a constant that are looked at before it is said to be zeros."""


@dataclass(slots=True, eq=False)
class Value:
    """How inputs reach a value, each as bits; results of one node share it.

    Attributes:
        reach: at all, by value and not by size.
        moved: its numbers are theirs, at other places, or changed by `SCALES`.
        recurrent: they are the first state of a recurrent operator, and this its last one.
        raw: whether its numbers are those of one input and nothing else.
    """

    reach: int = 0
    moved: int = 0
    recurrent: int = 0
    raw: bool = False


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
    """What was found.

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
        ports = {str(value.name): value for value in graph.inputs}
        self._values = {ports[port.name]: Value(1 << at, 1 << at, 0, True) for at, port in enumerate(inputs)}
        self._floats = sum(1 << at for at, port in enumerate(inputs) if port.dtype.startswith("float"))
        self._chance, self._ops = 1 << len(inputs), dict[str, None]()
        names = tuple(port.name for port in inputs)
        self.found = found = Structure(names, read_axes(graph, [ports[name] for name in names]))
        ends = {str(value.name): end for value, end in zip(graph.outputs, self._graph(graph), strict=True)}
        found.carried = {name: found.among(end.recurrent) for name, end in ends.items() if end.recurrent}
        found.random = [*self._ops], [name for name, end in ends.items() if end.reach & self._chance]

    def _of(self, values: Iterable[ir.Value | None]) -> list[Value]:
        return [(self._values.get(value) if value is not None else None) or Value() for value in values]

    def _graph(self, graph: ir.Graph) -> list[Value]:
        """Go through a graph, and return its results."""
        for node in graph:
            values, held = self._of(node.inputs), subgraphs(node)
            if node.op_type in ("Loop", "Scan") and held:
                self._loop(node, values, held[0])
            elif held:  # an If: what it returns is what either branch does
                results = [self._graph(each) for each in held]
                for at, output in enumerate(node.outputs):
                    ends = [result[at] for result in results if at < len(result)]
                    self._values[output] = _passing([*ends, *values], ends)
                self.found.branching.update(self.found.among(_any(values, "reach")))
            else:
                self._step(node, values)
        return self._of(graph.outputs)

    def _loop(self, node: ir.Node, values: list[Value], body: ir.Graph) -> None:
        """A Loop or Scan: what is carried enters the body, and what the body returns leaves it."""
        skipped = 2 if node.op_type == "Loop" else 0  # of the node and of its body: the count and the condition
        for entered, value in zip(body.inputs, [Value()] * skipped + values[skipped:], strict=False):
            self._values[entered] = _passing([value], [value])
        ends = self._graph(body)
        carried = len(values) - (node.attributes.get_int("num_scan_inputs", 0) or 0)
        self._carried(node.outputs, values[skipped:carried], [*values, *ends])

    def _carried(self, outputs: Sequence[ir.Value], starts: list[Value], inputs: list[Value]) -> None:
        """What a recurrence returns as the last states."""
        for at, output in enumerate(outputs):
            self._values[output] = Value(_any(inputs, "reach"), 0, _any(starts[at : at + 1], "moved"))

    def _step(self, node: ir.Node, values: list[Value]) -> None:
        op = node.op_type
        result = _passing([] if op in SIZES else values, self._passed(op, values))
        if op in SCALES:
            result.moved |= _any(values, "moved")
        elif op in RANDOM:
            result.reach |= self._chance
            self._ops[op] = None
        self._values.update(dict.fromkeys(node.outputs, result))
        if op in RECURRENT:
            count = RECURRENT[op]
            self._carried(node.outputs[1 : 1 + count], values[5 : 5 + count], values)
        elif op in ("Gather", "Equal") and len(values) > 1:
            self._asked(node, *values[:2])
        elif op == "Conv" and values:
            self._context(node, values[0])
        elif op in PRODUCTS or (op in JOINS and any(value.reach for value in values)):
            for sizes in map(_zeros, node.inputs[:1] if op in PRODUCTS else node.inputs):
                if sizes:
                    self.found.frozen[name_of(node)] = op, sizes

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

    def _asked(self, node: ir.Node, one: Value, two: Value) -> None:
        """Indices into tables, and numbers that settings are compared with."""
        if node.op_type == "Gather":
            table, axis = node.inputs[0], node.attributes.get_int("axis", 0)
            sizes = () if table is None or table.const_value is None else table.const_value.shape.numpy()
            if -len(sizes) <= axis < len(sizes):
                for name in self.found.among(two.moved):
                    self.found.rows[name] = min(self.found.rows.get(name, sizes[axis]), sizes[axis])
            return
        for value, other in ((one, node.inputs[1]), (two, node.inputs[0])):
            for name in self.found.among(value.moved):
                self.found.compared.setdefault(name, []).extend((numbers(other) or [])[:8])

    def _context(self, node: ir.Node, source: Value) -> None:
        """A convolution along one axis of an input alone, whose windows overlap what came before."""
        weight = node.inputs[1]
        sizes = () if weight is None or weight.const_value is None else weight.const_value.shape.numpy()
        if len(sizes) != 3 or not source.raw:
            return
        pads, value = [*node.attributes.get_ints("pads", (0, 0))], node.inputs[0]
        while value is not None and (maker := value.producer()) is not None:
            more = [*maker.attributes.get_ints("pads", ())] or numbers((*maker.inputs, None)[1]) or []
            if maker.op_type == "Pad" and more and len(more) % 2 == 0:
                pads = [pads[0] + more[len(more) // 2 - 1], pads[1] + more[-1]]
            value = maker.inputs[0]
        stride, dilation = ((node.attributes.get_ints(name, (1,)) or (1,))[0] for name in ("strides", "dilations"))
        needs = (sizes[2] - 1) * dilation + 1 - max(stride, 1) - pads[1]
        if pads[0] == 0 and needs > 0:
            self.found.contexts.append(Context(name_of(node), self.found.among(source.moved)[0], needs, stride))


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """The graphs that a node holds, such as the branches of an If."""
    held = [each for each in node.attributes.values() if each.type == ir.AttributeType.GRAPH]
    return [each.as_graph() for each in held]


def name_of(node: ir.Node) -> str:
    """A node's name, or its first result's."""
    return node.name or next((str(value.name) for value in node.outputs), "")


def _zeros(value: ir.Value | None) -> tuple[int, ...]:
    """The sizes of a constant of several zeros with several axes; () of anything else."""
    maker = None if value is None else value.producer()
    if maker is not None and maker.op_type == "ConstantOfShape" and maker.attributes.get("value") is None:
        sizes = numbers(maker.inputs[0])
        return tuple(sizes) if sizes and len(sizes) > 1 and np.prod(sizes, dtype=float) > 1 else ()
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or not tensor.dtype.is_floating_point() or not 1 < tensor.size <= MOST_ZEROS:
        return ()
    sizes = [*tensor.shape.numpy()]
    return tuple(sizes) if len(sizes) > 1 and not tensor.numpy().any() else ()


def _passing(inputs: Sequence[Value], passed: Sequence[Value]) -> Value:
    """A value that all inputs reach, and that has the numbers of those that are passed on."""
    moved, reach = _any(passed, "moved"), _any(inputs, "reach")
    raw = len(passed) == 1 and passed[0].raw and moved == reach
    return Value(reach, moved, _any(passed, "recurrent"), raw)


def _any(values: Iterable[Value], kind: str) -> int:
    """The inputs that reach one of these values in a way."""
    found = 0
    for value in values:
        found |= getattr(value, kind)
    return found
