"""States that are hidden in a graph, made explicit: what begins anew in every call becomes an input and an output.

A recurrence without a first state of its own forgets between calls, and a convolution with zeros in front of its first
position does. Here the recurrence takes the state where it starts and returns its last one. In place of the zeros stand
the last positions of the call before. That the opened graph, called segment by segment, is the same function as the
graph over the whole sequence has to be proven by running both: other operators forget too, and are not looked for.

A convolution with a stride is the same only where segments are multiples of the stride.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass
from txl_runtime.errors import CheckpointError, TxlError, UsageError, one_line, printable

from txl_export.families.graph.find.structure import RECURRENT, SIZES
from txl_export.families.graph.open.lengths import Sizes, whole_numbers
from txl_export.families.graph.open.windows import Window, read_window
from txl_export.families.graph.take.reading import Size
from txl_export.graphs.quantised_matmul import initializer

_KEEPS = frozenset({"Identity", "Cast", "Expand", "Tile", "Slice", "Reshape", "Squeeze", "Unsqueeze", "Transpose"})
"""Operators that only move the numbers of a first state, and repeat them."""
_END = 2**63 - 1
"""What stands for the end of an axis in a Slice."""
_RANK = 3
"""Axes of a recurrence's state: directions, sequences, numbers. A convolution has as many or more."""
_LENGTHS, _FIRST = 4, 5
"""The input of a recurrence that is the length of each sequence, and the first of those that it starts from."""
_NUMBERS = frozenset({None, ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})
"""Types of what a loop may carry as a state, None where it is not told; a count is none."""


@dataclass(frozen=True)
class Hidden:
    """A state that was made explicit.

    Attributes:
        name: of the state, made of the node's: the same for the same graph.
        node, op: what carries it: an LSTM, GRU, RNN or Conv.
        input, output: names of the new input and output.
        shape: of both; a text is the symbol of a size that is open, such as the number of sequences.
        batch_axis: where the sequences are. A graph that joins them with another axis has as many times more of them.
        initial: what the state begins with, with 1 at the batch axis; None for zeros.
    """

    name: str
    node: str
    op: str
    input: str
    output: str
    shape: tuple[Size, ...]
    batch_axis: int
    initial: NDArray[Any] | None


def open_hidden(model: ir.Model, segment: Mapping[str, int] | None = None) -> list[Hidden]:
    """Make the hidden states of a graph explicit, in place. The graph is of no use where this fails.

    Args:
        model: of opset 18 to 24, with constants folded. Where the file leaves sizes open, they had better be open here:
            more can be told of such a graph.
        segment: by name of an input, its axis of positions; empty where a call is one position, None where nobody
            knows. What runs along another axis, such as over bands, is left as it is. Where sizes do not tell that, a
            forward recurrence and zeros in front alone are taken for states.

    Returns:
        The states, in the order of the nodes; none where nothing is hidden.

    Raises:
        UsageError: something forgets that cannot be made explicit: what needs later positions, stands in a branch or
            loop, or begins with what is computed.
        CheckpointError: the graph's parts do not fit together.
    """
    try:
        return _opened(model, segment)
    except TxlError:
        raise
    except Exception as error:  # onnx-ir raises what happens to go wrong
        told = one_line(error)
        raise CheckpointError(
            f"a graph whose parts do not fit together ({told}), expected a valid one; export it again"
        ) from None


def _opened(model: ir.Model, segment: Mapping[str, int] | None) -> list[Hidden]:
    opening = _Opening(model, segment)
    for node, holders in list(_nodes(model.graph)):
        if node.op_type in RECURRENT:
            opening.recurrence(node, holders)
        elif node.op_type in ("Loop", "Scan"):
            opening.loop(node, holders)
        elif node.op_type == "Conv":
            opening.convolution(node, holders)
    model.graph.sort()  # what was added stands at the end
    RemoveUnusedNodesPass()(model)
    return opening.found


def _nodes(graph: ir.Graph, holders: tuple[ir.Node, ...] = ()) -> Iterator[tuple[ir.Node, tuple[ir.Node, ...]]]:
    """Every node of the standard with the nodes in whose graphs it stands, the outermost first."""
    for node in graph:
        if node.domain in ("", "ai.onnx"):
            yield node, holders
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from _nodes(attribute.as_graph(), (*holders, node))


class _Opening:
    def __init__(self, model: ir.Model, segment: Mapping[str, int] | None) -> None:
        self.found: list[Hidden] = []
        self._graph, self._sizes = model.graph, Sizes(model, segment)
        values = [*self._graph.inputs, *self._graph.initializers.values()]
        values += [output for node in self._graph.all_nodes() for output in node.outputs]
        self._names = {value.name for value in values}
        self._windows: dict[tuple[object, ...], ir.Value] = {}

    def recurrence(self, node: ir.Node, holders: Sequence[ir.Node]) -> None:
        """An LSTM, GRU or RNN: each of its states that has no first value from outside."""
        places, given = range(_FIRST, _FIRST + RECURRENT[node.op_type]), [*node.inputs, *[None] * 8]
        hidden, source = [at for at, place in enumerate(places) if not _sources(given[place])], given[0]
        layout = node.attributes.get_int("layout", 0)
        if not hidden or (self._sizes.follows(source, layout) is False and self._sizes.of(source)[layout] != 1):
            return
        self._check_outside(node, holders)
        direction = node.attributes.get_string("direction", "forward")
        if direction != "forward":
            raise UsageError(f"{_called(node)} is {direction}, expected forward: it needs positions that come later")
        if layout:
            raise UsageError(f"{_called(node)} has layout 1, expected 0; export it with positions as the first axis")
        known = [self._sizes.of(given[at])[1:2] for at in (0, *places)]
        rows = next((size for sizes in known for size in sizes if size is not None), None)
        shape = (1, rows, self._sizes.of(given[2])[-1])
        node.resize_inputs(max(len(node.inputs), places[hidden[-1]] + 1))
        node.resize_outputs(max(len(node.outputs), hidden[-1] + 2))
        for at in hidden:
            start = self._take(node, "hc"[at], shape, 1, self._first(node, given[places[at]], shape))
            node.replace_input_with(places[at], start)
            last = node.outputs[at + 1]
            last.name = last.name or f"{start.name}.last"
            if given[_LENGTHS] is not None:  # of a sequence without positions engines return zeros
                zero = initializer(self._graph, "opened.zero", np.int32(0))
                empty = self._add(start, "Equal", [given[_LENGTHS], zero])
                spread = self._add(start, "Unsqueeze", [empty, self._numbers(0, 2)])
                last = self._add(start, "Where", [spread, start, last])
            self._give(last, start)

    def loop(self, node: ir.Node, holders: Sequence[ir.Node]) -> None:
        """A Loop or Scan is opened by nobody: raise where it carries numbers that begin anew."""
        carried = node.inputs[: len(node.inputs) - node.attributes.get_int("num_scan_inputs", 0)]
        if any(value is not None and not _sources(value) and value.dtype in _NUMBERS for value in carried):
            self._check_outside(node, holders)
            raise UsageError(
                f"{_called(node)} carries what begins anew in every call, expected an LSTM, GRU or RNN; make its state "
                "an input and an output"
            )

    def convolution(self, node: ir.Node, holders: Sequence[ir.Node]) -> None:
        """A Conv that reads zeros in front of the first position, along one axis."""
        window, chosen = read_window(node, self._sizes), list[int]()
        if window is None:
            return
        for at, (front, behind) in enumerate(zip(window.front, window.behind, strict=True)):
            follows = self._sizes.follows(window.source, at + 2)
            padded = front or behind if follows else front > 0 >= behind
            if window.spans[at] > 1 and padded and follows is not False:
                self._check_outside(node, holders)
                if fault := window.fault(at):
                    raise UsageError(f"{_called(node)} {fault}; export a causal model")
                chosen.append(at)
        if len(chosen) > 1:
            raise UsageError(
                f"{_called(node)} has zeros in front along {len(chosen)} axes, expected positions along one"
            )
        if chosen:
            self._open_window(node, window, chosen[0])

    def _open_window(self, node: ir.Node, window: Window, at: int) -> None:
        key = source, zeros, axis = window.source, window.front[at], at + 2
        if key not in self._windows:  # what several read is carried once
            shape = [zeros if each == axis else size for each, size in enumerate(self._sizes.of(source))]
            state = self._take(node, "window", shape, 0, None)
            self._windows[key] = joined = self._add(state, "Concat", [state, source], axis=axis)
            ends = [self._numbers(number) for number in (-zeros, _END, axis)]
            self._give(self._add(state, "Slice", [joined, *ends]), state)
        node.replace_input_with(0, self._windows[key])
        front = [0 if each == at else number for each, number in enumerate(window.front)]
        node.attributes["pads"] = ir.AttrInt64s("pads", [*front, *window.behind])
        if window.cut is not None:
            left_out, made = window.cut.outputs[0], node.outputs[0]
            ir.convenience.replace_nodes_and_values(self._graph, node, [window.cut], [], [left_out], [made])

    def _take(
        self, node: ir.Node, kind: str, shape: Sequence[Size | None], batch_axis: int, initial: NDArray[Any] | None
    ) -> ir.Value:
        """A state of a node: its input. The output comes with `_give`."""
        sizes = tuple(size for size in shape if size is not None)
        if len(sizes) != len(shape) or not sizes:
            raise UsageError(
                f"{_called(node)} has a state of sizes {[*shape]}, expected ones that follow from the inputs; give "
                "open sizes by --fix NAME=SIZE"
            )
        stem = re.sub(r"\W+", "_", _name(node), flags=re.ASCII).strip("_")
        stem = stem if stem.isidentifier() else f"{node.op_type}_{stem}"
        names = (f"{stem}{f'_{number}' if number else ''}.{kind}" for number in count())
        name = next(name for name in names if not self._names & {name, f"new_{name}"})
        self._names |= {name, f"new_{name}"}
        self.found.append(Hidden(name, _name(node), node.op_type, name, f"new_{name}", sizes, batch_axis, initial))
        dtype = next(value.dtype for value in node.inputs[1:] if value is not None)  # that of the weights
        made = ir.Value(name=name, type=ir.TensorType(dtype or ir.DataType.FLOAT), shape=ir.Shape(sizes))
        self._graph.inputs.append(made)
        return made

    def _give(self, value: ir.Value, state: ir.Value) -> None:
        """Return a value as what a state is in the next call."""
        if value.is_graph_output():
            value = self._add(state, "Identity", [value])
        value.name, value.type, value.shape = f"new_{state.name}", state.type, state.shape
        self._graph.outputs.append(value)

    def _add(self, state: ir.Value, op: str, inputs: Sequence[ir.Value | None], **attributes: int) -> ir.Value:
        """What another node makes, for a state."""
        node = ir.node(op, inputs, attributes, name=f"{op}.{state.name}")
        node.outputs[0].name = f"{state.name}.{op}"
        self._graph.append(node)
        return node.outputs[0]

    def _numbers(self, *numbers: int) -> ir.Value:
        return initializer(self._graph, f"opened.is.{'.'.join(map(str, numbers))}", np.array(numbers, np.int64))

    def _first(self, node: ir.Node, value: ir.Value | None, shape: Sequence[Size | None]) -> NDArray[Any] | None:
        """What a state begins with, with one row for all sequences; None for zeros."""
        first, size = _constant(value), shape[-1]
        row = np.zeros(0) if first is None else first[:, :1] if first.ndim == _RANK else first
        if not isinstance(size, int) or row.shape not in ((), (1, 1, size)) or not np.all(first == row):
            raise UsageError(
                f"{_called(node)} begins with what is computed or differs between sequences, expected one constant; "
                "make its first state an input"
            )
        return np.broadcast_to(row, (1, 1, size)) if row.any() else None

    def _check_outside(self, node: ir.Node, holders: Sequence[ir.Node]) -> None:
        """Raise where a node stands in another node's graph."""
        if not holders:
            return
        deciding = [source for holder in holders if holder.op_type == "If" for source in _sources(holder.inputs[0])]
        fixes = [f"{source.name}=VALUE" for source in deciding if source in self._graph.inputs] or ["NAME=SIZE"]
        branches = any(holder.op_type == "If" for holder in holders)
        advice = f"choose one branch by --fix {fixes[0]}" if branches else "export a model without it"
        raise UsageError(
            f"{_called(node)} begins anew inside {_called(holders[-1])}, expected it outside of branches and loops; "
            f"{advice}"
        )


def _name(node: ir.Node) -> str:
    return node.name or str(node.outputs[0].name)


def _called(node: ir.Node) -> str:
    return f"{node.op_type} {printable(_name(node))!r}"


def _sources(value: ir.Value | None) -> list[ir.Value]:
    """Inputs of graphs, and results of nodes that hold graphs, whose numbers reach a value: not their sizes alone."""
    left, seen, found = [value], set[ir.Value](), list[ir.Value]()
    while left:
        each = left.pop()
        if each is None or each in seen or ir.convenience.get_const_tensor(each) is not None:
            continue
        seen.add(each)
        node = each.producer()
        if node is None or any(attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values()):
            found.append(each)
        elif node.op_type not in SIZES:
            left += node.inputs
    return found


def _constant(value: ir.Value | None) -> NDArray[Any] | None:
    """An array that broadcasts to a value that is made of constants and sizes; None where it cannot be told."""
    moved, tensor = list[ir.Node](), None
    while value is not None and (tensor := ir.convenience.get_const_tensor(value)) is None:
        node = value.producer()
        if node is None or node.op_type not in _KEEPS:
            filled = None if node is None else node.attributes.get("value")
            kept = np.zeros(1) if filled is None else filled.as_tensor().numpy()
            return kept.reshape(()) if node is not None and node.op_type == "ConstantOfShape" else None
        moved.append(node)
        value = node.inputs[0]
    first = np.zeros(()) if tensor is None else tensor.numpy()
    if first.size and (first == first.flat[0]).all():  # wherever it is moved
        return np.asarray(first.flat[0])
    for node in reversed(moved):
        if node.op_type in ("Expand", "Tile"):
            first = np.array(first, ndmin=_RANK)
        elif node.op_type == "Slice" and first.ndim == _RANK:
            starts, ends, axes, steps = (whole_numbers(each) for each in (*node.inputs, None, None)[1:5])
            if (
                not starts
                or not ends
                or not axes
                or steps not in (None, [1] * len(axes))
                or max(map(abs, axes)) >= _RANK
            ):
                return None
            for start, end, axis in zip(starts, ends, axes, strict=False):
                if first.shape[axis] > 1:
                    first = np.take(first, np.arange(first.shape[axis])[start:end], axis)
        elif node.op_type not in ("Identity", "Cast"):
            return None
    return first
