"""Makes hidden states of a graph explicit: a state that begins anew in every call becomes an input and an output.

A recurrent operator without an initial state from outside forgets between calls. So do a convolution with zeros before
the first position, a transposed convolution whose results overlap, and a sum over positions. Each of these nodes gets
its state as an input and returns its last state. Other operators forget, too, and are not looked for. So both graphs
have to be run, to check that the opened graph computes segment by segment what the original computes over the whole
sequence. A convolution with a stride is right only if segments are multiples of the stride.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass
from txl_runtime.errors import CheckpointError, TxlError, UsageError, one_line, printable
from txl_runtime.sandbox.process import EndedError

from txl_export.families.graph.find.nodes import RECURRENT, name_of, numbers
from txl_export.families.graph.open.measuring import END, Fold, Sizes
from txl_export.families.graph.open.windows import Window, read_tail, read_window
from txl_export.families.graph.take.reading import Size
from txl_export.families.graph.take.worker import WHOLE
from txl_export.graphs.quantised_matmul import initializer

_FIRST = 5
"""Number of the input that holds the first initial state of a recurrent operator."""
_SCALES = frozenset(("Add", "Sub", "Mul", "Div", "Cast", "Expand", "Reshape", "Squeeze", "Unsqueeze", "Transpose"))
"""Operators that may stand between a sum over positions and its division by the count of positions (an average)."""
_ANEW = "begins with the same numbers in every call"
_Read = tuple[str, str, Callable[[], None]]
"""`Forgets.what`, `Forgets.fault`, and a function that makes the state explicit."""


@dataclass(frozen=True)
class Hidden:
    """A state that was made explicit.

    Attributes:
        node, op: name and type of the node that the state belongs to: LSTM, GRU, RNN, Conv, ConvTranspose, CumSum or
            Range.
        input, output: names of the new input and output, e.g. lstm.h and new_lstm.h; the same graph always gets the
            same names.
        shape: the shape of both; a text is the symbol of an open size, e.g. the number of sequences.
        initial: the initial value of a recurrence, [1, 1, numbers]; None for zeros.
    """

    node: str
    op: str
    input: str
    output: str
    shape: tuple[Size, ...]
    initial: NDArray[Any] | None


@dataclass(frozen=True)
class Forgets:
    """A node that begins anew in every call.

    Attributes:
        node, op: its name and operator.
        what: the end of a sentence that begins with "This node", e.g. "begins with the same numbers in every call".
        fault: the reason why its state cannot be made explicit; "" if it can.
    """

    node: str
    op: str
    what: str
    fault: str


def forgets(model: ir.Model, segment: Mapping[str, int], fold: Fold) -> list[Forgets]:
    """List the nodes that `open_hidden` would open or refuse, without changing the graph.

    Arguments and errors are those of `open_hidden`.
    """
    with _checked():
        return [state for state, _ in _Opening(model, segment, fold).forgets()]


def open_hidden(model: ir.Model, segment: Mapping[str, int], fold: Fold) -> list[Hidden]:
    """Make the hidden states of a graph explicit, in place. After an error the graph is unusable.

    Args:
        model: a graph of opset 18 to 27 with constants folded. Open sizes give more information than fixed sizes.
        segment: the axis of positions by the name of an input; {} if unknown. Operators along other axes, e.g. over
            frequency bands, stay. If sizes do not show the axis, a forward recurrence, or zeros only in front, is taken
            for a state.
        fold: computes constants of a graph.

    Returns:
        The states in the order of the nodes; [] if nothing is hidden.

    Raises:
        UsageError: a node forgets and cannot be opened: it needs later positions, is inside a branch or loop, or begins
            with different numbers for each sequence.
        CheckpointError: the graph's parts do not fit together.
        EndedError: see `Fold`.
    """
    with _checked():
        opening = _Opening(model, segment, fold)
        for state, make in opening.forgets():
            if state.fault:
                raise UsageError(f"{state.op} {printable(state.node)!r} {state.fault}")
            make()
        model.graph.sort()  # the new nodes were appended at the end
        RemoveUnusedNodesPass()(model)
        return opening.found


@contextlib.contextmanager
def _checked() -> Iterator[None]:
    try:
        yield
    except (TxlError, EndedError):
        raise
    except Exception as error:  # onnx-ir raises many types of errors
        raise CheckpointError(
            f"a graph whose parts do not fit together ({one_line(error)}), expected a valid one; export it again"
        ) from None


def _nodes(graph: ir.Graph, holder: ir.Node | None = None) -> Iterator[tuple[ir.Node, ir.Node | None]]:
    """Yield every node of a standard operator, with the If, Loop or Scan that contains it, or None."""
    for node in graph:
        if not node.domain or node.op_type in WHOLE:
            yield node, holder
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from _nodes(attribute.as_graph(), node)


class _Opening:
    def __init__(self, model: ir.Model, segment: Mapping[str, int], fold: Fold) -> None:
        self.found: list[Hidden] = []
        self._graph, self._sizes = model.graph, Sizes(model, segment, fold)
        self._names = {*ir.convenience.create_value_mapping(self._graph)}
        self._windows: dict[tuple[object, ...], ir.Value] = {}
        self._counts, self._numbers_of = self._counting(), defaultdict[str, Iterator[int]](count)

    def forgets(self) -> Iterator[tuple[Forgets, Callable[[], None]]]:
        """Yield each node that begins anew, with a function that makes its state explicit."""
        readers: dict[str, Callable[[ir.Node], _Read | None]] = {
            **dict.fromkeys(RECURRENT, self._recurrence),
            **dict.fromkeys(("Loop", "Scan"), self._loop),
            **dict.fromkeys(WHOLE, self._stateless),
            "Conv": self._convolution,
            "ConvTranspose": self._transposed,
            "CumSum": self._sum,
            "Range": self._count,
        }
        for node, holder in list(_nodes(self._graph)):
            if (reader := readers.get(node.op_type)) is not None and (read := reader(node)) is not None:
                what, fault, make = read
                yield Forgets(name_of(node), node.op_type, what, _inside(holder) or fault), make

    # ---- nodes that forget

    def _recurrence(self, node: ir.Node) -> _Read | None:
        """Read an LSTM, GRU or RNN, whose states are hidden if no initial value comes from outside."""
        places, inputs = range(_FIRST, _FIRST + RECURRENT[node.op_type]), [*node.inputs, *[None] * 8]
        starts = {at: self._sizes.constant(inputs[place]) for at, place in enumerate(places)}
        hidden = [at for at, place in enumerate(places) if inputs[place] is None or starts[at] is not None]
        if not hidden or (self._sizes.follows(inputs[0], 0) is False and self._sizes.of(inputs[0])[0] != 1):
            return None
        fault = ""
        if (direction := node.attributes.get_string("direction", "forward")) != "forward":
            fault = f"is {direction}, expected forward: it needs positions that come later"
        elif any(first is not None and (first != first[:, :1]).any() for first in starts.values()):
            fault = "begins with other numbers for each sequence, expected the same; make its first state an input"
        other = any(first is not None and first.any() for first in starts.values())
        what = f"{_ANEW}{', which are not zeros' * other}"
        return what, fault, partial(self._open_recurrence, node, {at: starts[at] for at in hidden})

    def _open_recurrence(self, node: ir.Node, starts: Mapping[int, NDArray[Any] | None]) -> None:
        inputs = [*node.inputs, *[None] * 8]
        rows, width = self._sizes.of(inputs[0])[1:2] or (None,), self._sizes.of(inputs[2])[-1:]
        node.resize_inputs(max(len(node.inputs), _FIRST + max(starts) + 1))
        node.resize_outputs(max(len(node.outputs), max(starts) + 2))
        for at, first in starts.items():
            initial = first[:, :1] if first is not None and first.any() else None
            start = self._take(node, "hc"[at], (1, *rows, *width), self._sizes.dtype(inputs[0]), initial)
            node.replace_input_with(_FIRST + at, start)
            node.outputs[at + 1].name = node.outputs[at + 1].name or f"{start.name}.last"
            self._give(node.outputs[at + 1], start)

    def _loop(self, node: ir.Node) -> _Read | None:
        """Read a Loop or Scan that carries constant floats, which is always refused; constant integers are counters."""
        carried = node.inputs[: len(node.inputs) - node.attributes.get_int("num_scan_inputs", 0)]
        if not any((first := self._sizes.constant(value)) is not None and first.dtype.kind == "f" for value in carried):
            return None
        advice = "expected an LSTM, GRU or RNN; make its state an input and output"
        return _ANEW, f"carries what begins anew in every call, {advice}", lambda: None

    def _stateless(self, node: ir.Node) -> _Read | None:
        """Read a LinearAttention or CausalConvWithState without `past_state`, which the user has to add."""
        if (*node.inputs, *[None] * 4)[3] is not None:
            return None
        return (
            _ANEW,
            "is given no past_state, expected one; make it an input, and present_state an output",
            lambda: None,
        )

    def _convolution(self, node: ir.Node) -> _Read | None:
        """Read a Conv that reads zeros before the first position, along one axis."""
        if (window := read_window(node, self._sizes)) is None:
            return None
        for at, (front, behind) in enumerate(zip(window.front, window.behind, strict=True)):
            follows = self._sizes.follows(window.source, at + 2)
            padded = front or behind if follows else front > 0 >= behind
            if window.spans[at] > 1 and padded and follows is not False:
                what, fault = f"reads {front} zeros in front of the first position of every call", window.fault(at)
                return what, fault and f"{fault}; export a causal model", partial(self._open_window, node, window, at)
        return None

    def _open_window(self, node: ir.Node, window: Window, at: int) -> None:
        key = source, zeros, axis = window.source, window.front[at], at + 2
        if key not in self._windows:  # convolutions with the same source and number of zeros share one state
            shape = [zeros if each == axis else size for each, size in enumerate(self._sizes.of(source))]
            state = self._take(node, "window", shape, self._sizes.dtype(source))
            self._windows[key] = joined = self._add(state, "Concat", [state, source], axis=axis)
            self._give(self._cut(state, joined, -zeros, END, axis), state)
        node.replace_input_with(0, self._windows[key])
        front = [0 if each == at else number for each, number in enumerate(window.front)]
        node.attributes["pads"] = ir.AttrInt64s("pads", [*front, *window.behind])
        if window.cut is not None:
            left_out, result = window.cut.outputs[0], node.outputs[0]
            ir.convenience.replace_nodes_and_values(self._graph, node, [window.cut], [], [left_out], [result])

    def _transposed(self, node: ir.Node) -> _Read | None:
        """Read a ConvTranspose whose last results overlap the results of the next positions."""
        if (read := read_tail(node, self._sizes)) is None:
            return None
        window, at, fault = read
        what = f"loses {window.spans[at] - window.strides[at]} results of every call that are part of the next one's"
        return what, fault and f"{fault}; export a causal model", partial(self._open_tail, node, window, at)

    def _open_tail(self, node: ir.Node, window: Window, at: int) -> None:
        tail, axis, old = window.spans[at] - window.strides[at], at + 2, node if window.cut is None else window.cut
        shape = [tail if each == axis else size for each, size in enumerate(self._sizes.of(node.outputs[0]))]
        state = self._take(node, "tail", shape, self._sizes.dtype(node.outputs[0]))
        full = self._again(state, node, node.inputs[:2])
        for name, none in (("pads", [0] * 2 * len(window.spans)), ("output_padding", [0] * len(window.spans))):
            numbers = [*node.attributes.get_ints(name, none)]
            numbers[at :: len(window.spans)] = [0] * (len(numbers) // len(window.spans))
            full.producer().attributes[name] = ir.AttrInt64s(name, numbers)  # type: ignore[union-attr]
        begun = self._add(state, "Add", [self._cut(state, full, 0, tail, axis), state])
        joined = self._add(state, "Concat", [begun, self._cut(state, full, tail, END, axis)], axis=axis)
        self._give(self._cut(state, joined, -tail, END, axis), state)
        result = self._cut(state, joined, 0, -tail, axis)
        if (bias := (*node.inputs, None)[2]) is not None:
            wide = self._add(state, "Unsqueeze", [bias, self._numbers(*range(1, len(shape) - 1))])
            result = self._add(state, "Add", [result, wide])
        self._replace(old, result)

    def _sum(self, node: ir.Node) -> _Read | None:
        """Read a CumSum along positions."""
        axes, source = numbers(node.inputs[1]), node.inputs[0]
        rank = len(self._sizes.of(source))
        if not axes or not rank or not self._sizes.follows(source, axes[0] % rank):
            return None
        backwards = "sums up from the last position, expected from the first: it needs positions that come later"
        fault = backwards if node.attributes.get_int("reverse", 0) else ""
        return "sums up the positions of one call alone", fault, partial(self._open_sum, node, axes[0] % rank)

    def _open_sum(self, node: ir.Node, axis: int) -> None:
        source = node.inputs[0]
        shape = [1 if each == axis else size for each, size in enumerate(self._sizes.of(source))]
        state = self._take(node, "sum", shape, self._sizes.dtype(source))
        # sum the state first, so that numbers are added in the file's order
        joined = self._add(state, "Concat", [state, source], axis=axis)
        sums = self._again(state, node, [joined, node.inputs[1]])
        last = self._cut(state, sums, -1, END, axis)
        if node.attributes.get_int("exclusive", 0):
            last = self._add(state, "Add", [last, self._cut(state, source, -1, END, axis)])
        self._give(last, state)
        self._replace(node, self._cut(state, sums, 1, END, axis))

    def _counting(self) -> set[ir.Node]:
        """Return the Ranges along positions by which a sum over positions is divided."""
        counts, sums, nodes = dict[ir.Value, ir.Node](), set[ir.Value](), set[ir.Node]()
        for node in self._graph:
            result, inputs = node.outputs[0], [value for value in node.inputs if value is not None]
            if node.op_type == "CumSum":
                sums.add(result)
            elif node.op_type == "Range" and self._sizes.follows(result, 0):
                counts[result] = node
            elif node.op_type in _SCALES:
                ranges = [counts[value] for value in inputs if value in counts]
                if sums & {*inputs}:
                    sums.add(result)
                    nodes |= {*ranges} if node.op_type in ("Div", "Mul") else set()
                if ranges:
                    counts[result] = ranges[0]
        return nodes

    def _count(self, node: ir.Node) -> _Read | None:
        """Read a Range that counts positions for an average."""
        if node not in self._counts:
            return None
        return "counts the positions of one call alone", "", partial(self._open_count, node)

    def _open_count(self, node: ir.Node) -> None:
        kind = self._sizes.dtype(node.outputs[0])
        state = self._take(node, "count", [1], kind)
        inside = self._add(state, "Range", node.inputs)
        number = self._add(state, "Cast", [self._add(state, "Size", [inside])], to=kind.value)
        self._give(self._add(state, "Add", [state, self._add(state, "Mul", [number, node.inputs[2]])]), state)
        self._replace(node, self._add(state, "Add", [inside, state]))

    # ---- adding nodes

    def _take(
        self,
        node: ir.Node,
        kind: str,
        shape: Sequence[Size | None],
        dtype: ir.DataType,
        initial: NDArray[Any] | None = None,
    ) -> ir.Value:
        """Add a state's input for a node and record the state; `_give` adds the output."""
        sizes = tuple(size for size in shape if size is not None)
        if len(sizes) != len(shape) or not sizes:
            raise UsageError(
                f"{node.op_type} {printable(name_of(node))!r} has a state of sizes {[*shape]}, expected ones that "
                "follow from the inputs; give open sizes by --fix NAME=SIZE"
            )
        stem = re.sub(r"\W+", "_", name_of(node), flags=re.ASCII).strip("_")
        stem = stem if stem.isidentifier() else f"{node.op_type}_{stem}"
        names = (f"{stem}{f'_{number}' if number else ''}.{kind}" for number in self._numbers_of[f"{stem}.{kind}"])
        name = next(name for name in names if not self._names & {name, f"new_{name}"})
        self._names |= {name, f"new_{name}"}
        self.found.append(Hidden(name_of(node), node.op_type, name, f"new_{name}", sizes, initial))
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(sizes))
        self._graph.inputs.append(value)
        return value

    def _give(self, value: ir.Value, state: ir.Value) -> None:
        """Make a value the next value of a state: add it to the graph's outputs."""
        if value.is_graph_output():
            value = self._add(state, "Identity", [value])
        value.name, value.type, value.shape = f"new_{state.name}", state.type, state.shape
        self._graph.outputs.append(value)

    def _add(self, state: ir.Value, op: str, inputs: Sequence[ir.Value | None], **attributes: int) -> ir.Value:
        """Add a node for a state; return its result."""
        node = ir.node(op, inputs, attributes, name=f"{op}.{next(self._numbers_of[op])}.{state.name}")
        node.outputs[0].name = f"{state.name}.{node.name}"
        self._graph.append(node)
        return node.outputs[0]

    def _again(self, state: ir.Value, node: ir.Node, inputs: Sequence[ir.Value | None]) -> ir.Value:
        """Add a copy of a node with other inputs; return its result."""
        result = self._add(state, node.op_type, inputs)
        result.producer().attributes.update(node.attributes)  # type: ignore[union-attr]
        return result

    def _cut(self, state: ir.Value, value: ir.Value | None, start: int, end: int, axis: int) -> ir.Value:
        return self._add(state, "Slice", [value, *(self._numbers(number) for number in (start, end, axis))])

    def _replace(self, node: ir.Node, value: ir.Value) -> None:
        """Replace a node's result by a value; all that is known of the result's sizes is then known of the value's."""
        self._sizes.same(value, node.outputs[0])
        ir.convenience.replace_nodes_and_values(self._graph, node, [node], [], [node.outputs[0]], [value])

    def _numbers(self, *numbers: int) -> ir.Value:
        return initializer(self._graph, f"opened.is.{'.'.join(map(str, numbers))}", np.array(numbers, np.int64))


def _inside(holder: ir.Node | None) -> str:
    """Return the fault of a node inside an If, Loop or Scan; "" for other nodes."""
    if holder is None:
        return ""
    advice = "choose one branch by --fix NAME=VALUE" if holder.op_type == "If" else "export a model without it"
    held = f"{holder.op_type} {printable(name_of(holder))!r}"
    return f"begins anew inside {held}, expected it outside of branches and loops; {advice}"
