"""Makes a program of L positions from a step of one position: nodes outside recurrences run once for all positions.

    h' = tanh(a x + b h)      a x of all positions is one product; b h, the sum and tanh are written L times
    y  = c h'                 one product again

All positions of all sequences are rows of one batch: row t·B + b is position t of sequence b. So a Split along the axis
of sequences gives the positions, and a Concat joins them. Some states depend on no earlier state, only on the position
before, such as the last row, or a window of the last four. Their rows are the rows they are copied from, one position
later.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from graphlib import TopologicalSorter
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import RemoveUnusedNodesPass
from txl_runtime.bundle.axes import Axes
from txl_runtime.bundle.open_batch import BATCH

from txl_export.graphs.linear_attention import CHUNK, CHUNK_BY_KEY, Part, by_chunks
from txl_export.graphs.passes.builder import Builder
from txl_export.graphs.passes.values import sizes_of
from txl_export.graphs.quantised_matmul import initializer
from txl_export.graphs.recurrences import Core, find_cores
from txl_export.graphs.retention import Retention, find_retention
from txl_export.graphs.state_parts import original, take_apart


class UnliftedError(Exception):
    """A step's positions cannot become rows of a batch; the message says why."""


def lifted(step: ir.Model, states: int, axes: Mapping[str, Axes], batch: int, length: int) -> ir.Model:
    """Make a program of several positions from a step of one position.

    Args:
        step: a settled graph with an open number of sequences (`graphs.opening`). Its last inputs are states, and its
            last outputs their next values in the same order.
        states: the number of states.
        axes: the axes of sequences and positions in the program's inputs and outputs that are no states; the step's
            inputs and outputs have the same axes without positions.
        batch, length: the batch size B and segment length L.

    Returns:
        The program, with the step's inputs and outputs; values inside have no shapes yet.

    Raises:
        UnliftedError: the axis of sequences of a value is unknown.
    """
    model = step.clone()
    return _Lifting(model, states, axes, batch, length).program


class _Lifting:
    """Writes the program from the step.

    Attributes:
        program: the program.
        _rows, _pieces: for a value of the step, the program's value for all positions, and its value for each.
        _first: for a state of the step, its value before the segment.
        _behind: for a state computed in chunks, its value after the segment.
        _results: the step's outputs other than states.
        _after: for a state of the step, its next value.
    """

    def __init__(self, model: ir.Model, states: int, axes: Mapping[str, Axes], batch: int, length: int) -> None:
        self._step, self._batch, self._length = model.graph, batch, length
        self.program = ir.Model(ir.Graph([], [], nodes=[], opset_imports=model.graph.opset_imports), ir_version=10)
        self._build = Builder(self.program.graph, "rows")
        self._rows, self._pieces = dict[ir.Value, ir.Value](), dict[ir.Value, Sequence[ir.Value]]()
        self._first, self._behind = dict[ir.Value, ir.Value](), dict[ir.Value, ir.Value]()
        self._sizes = _cut_sizes(model, (batch, batch * length))
        inputs, results = list(model.graph.inputs), list(model.graph.outputs)
        names = [str(value.name) for value in results]
        for value in inputs:
            place = axes.get(str(value.name))
            sizes = [batch if size == BATCH else size for size in sizes_of(value)]
            shape = ir.Shape(sizes if place is None else place.sizes(batch, length))
            self.program.graph.inputs.append(value_in_loop := ir.Value(name=value.name, type=value.type, shape=shape))
            if place is None:
                self._first[value] = value_in_loop
            else:
                self._rows[value] = self._to_rows(value_in_loop, place)
        stacks = take_apart(model, states) if length > 1 else []
        for stack in stacks:
            parts = stack.apart(self._build, self._first[stack.state])
            self._first.update(zip(stack.parts, parts, strict=True))
        outputs, others = list(model.graph.outputs), len(results) - states
        self._results: set[object] = {*outputs[:others], *map(original, outputs[:others])}
        self._after = dict(
            zip(model.graph.inputs[len(inputs) - states :], map(original, outputs[others:]), strict=True)
        )
        self._write()
        last = {state: self._last(state) for state in self._after}
        for stack in reversed(stacks):
            last[stack.state] = stack.together(self._build, [last[part] for part in stack.parts])
        named = zip(outputs[:others], names, strict=False)
        made_results = [self._from_rows(self._all(value), axes[name]) for value, name in named]
        self.program.graph.outputs.extend([*made_results, *(last[state] for state in inputs[len(inputs) - states :])])
        RemoveUnusedNodesPass()(self.program)

    def _write(self) -> None:
        """Write all values that results and next states need, each before the nodes that read it."""
        cores, chunks = find_cores(self._step, self._after), dict[Hashable, tuple[ir.Value, Retention]]()
        for core, nodes in list(cores.items()):
            (state, *more), other_nodes = core, {node for other in cores if other is not core for node in cores[other]}
            if self._length > 1 and not more:
                retention = find_retention(state, self._after, nodes, self._results.union(other_nodes))
                if retention is not None:
                    chunks[core], cores[core] = (state, retention), list(retention.nodes)
        whose = {part: core for core, nodes in cores.items() for part in (*core, *nodes)}
        before: dict[Hashable, list[Hashable]] = {}
        for node in self._step:
            read = before.setdefault(whose.get(node, node), [])
            read += (whose.get(one, one) for value in node.inputs if (one := self._maker(value)) is not None)
        for state, after in self._after.items():
            read = before.setdefault(whose.get(state, state), [])
            read += (whose.get(one, one) for one in (self._maker(after),) if one is not None)
        others = {part: [other for other in read if other is not part] for part, read in before.items()}
        for part in TopologicalSorter(others).static_order():
            if isinstance(part, ir.Node):
                self._once(part)
            elif isinstance(part, ir.Value):
                self._handed_on(part)
            elif part in chunks:
                self._in_chunks(*chunks[part])
            elif isinstance(part, frozenset):
                self._repeated(part, cores[part])

    def _maker(self, value: ir.Value | None) -> ir.Node | ir.Value | None:
        """Return the node or state that a value comes from; None for inputs and constants."""
        if value is None or value in self._after:
            return value
        return value.producer()

    def _once(self, node: ir.Node) -> None:
        """Write a node once, for all positions."""
        copied = self._copy(node, [self._all(value) for value in node.inputs])
        self._rows.update(zip(node.outputs, copied, strict=True))

    def _handed_on(self, state: ir.Value) -> None:
        """Set the rows of a state outside recurrences: each position has the value made one position before."""
        first, after = self._first[state], self._after[state]
        if self._length == 1:
            self._rows[state] = first
        elif after in self._rows and (axis := self._axis(after)) is not None:
            earlier = self._build.slice(self._rows[after], axis, 0, self._batch * (self._length - 1))
            self._rows[state] = self._build.concat([first, earlier], axis)
        else:
            self._pieces[state] = [first, *(self._piece(after, at) for at in range(self._length - 1))]

    def _repeated(self, states: Core, nodes: Sequence[ir.Node]) -> None:
        """Write the nodes of a recurrence for one position after another."""
        columns = {value: list[ir.Value]() for value in (*states, *(out for node in nodes for out in node.outputs))}
        now = {state: self._first[state] for state in states}
        for position in range(self._length):
            for node in nodes:
                read = [None if one is None else now.get(one) or self._piece(one, position) for one in node.inputs]
                now.update(zip(node.outputs, self._copy(node, read, f".at.{position}"), strict=True))
            for value, pieces in columns.items():
                pieces.append(now[value])
            now |= {state: now[self._after[state]] for state in states}
        self._pieces.update(columns)

    def _in_chunks(self, state: ir.Value, one: Retention) -> None:
        """Write a recurrence whose state is a matrix per head, for all positions at once; see `graphs.retention`."""
        build, heads, batch, length = self._build, math.prod(one.heads), self._batch, self._length

        def numbers(rows: ir.Value, *own: int) -> ir.Value:
            """Reshape rows to [B, L, heads, *own]."""
            if batch == 1:
                return build.reshape(rows, [1, length, heads, *own])
            return build.transpose(build.reshape(rows, [length, batch, heads, *own]), (1, 0, 2, 3, 4))

        value = self._all(one.value)
        for factor in one.factors:
            value = build.op("Mul", [value, self._all(factor)])
        decay = None
        if isinstance(one.decay, ir.Value):
            decay = self._all(one.decay)
            if one.decay_by == "Sigmoid":
                decay = build.op("Neg", [build.op("Softplus", [build.op("Neg", [decay])])])
            decay = numbers(decay, 1, one.rates)
        elif one.decay is not None:
            decay = build.constant(np.tile(one.decay.reshape(1, 1, heads, 1, one.rates), (1, length, 1, 1, 1)))
        whole = Part(
            numbers(self._all(one.query), one.queries, one.keys),
            numbers(self._all(one.key), 1, one.keys),
            numbers(value, 1, one.values),
            decay,
            one.beta and numbers(self._all(one.beta), 1, 1),
        )
        sizes = [batch, *one.heads, one.keys, one.values]
        first = build.reshape(self._first[state], [batch, heads, one.keys, one.values])
        size = CHUNK_BY_KEY if one.rates > 1 else CHUNK
        result, last = by_chunks(build, whole, first, length, size, one.rates)
        if batch > 1:
            result = build.transpose(result, (1, 0, 2, 3, 4))
        self._rows[one.read] = build.reshape(result, [batch * length, *sizes_of(one.read)[1:]])
        self._behind[state] = build.reshape(last, sizes)

    def _last(self, state: ir.Value) -> ir.Value:
        """Return the value of a state after the segment."""
        if state in self._behind:
            return self._behind[state]
        after = self._after[state]
        axis = self._axis(after)
        if self._length == 1 or axis is None or after in self._pieces:
            return self._piece(after, self._length - 1)
        return self._build.slice(self._all(after), axis, self._batch * (self._length - 1), self._batch * self._length)

    def _all(self, value: ir.Value | None) -> Any:
        """Return the program's value that holds a value of the step for all positions."""
        if value is None or value in self._rows:
            return value and self._rows[value]
        if value in self._sizes[self._batch * self._length]:
            return self._number(value, self._batch * self._length)
        if value.const_value is not None:
            self._rows[value] = initializer(self.program.graph, str(value.name), value.const_value.numpy())
        else:
            pieces, axis = self._pieces[value], self._axis(value)
            self._rows[value] = pieces[0] if axis is None else self._build.concat(pieces, axis)
        return self._rows[value]

    def _piece(self, value: ir.Value, position: int) -> ir.Value:
        """Return the program's value that holds a value of the step for one position."""
        if value in self._sizes[self._batch]:
            return self._number(value, self._batch)
        if value not in self._pieces:
            whole, axis = self._all(value), self._axis(value)
            split = axis is not None and self._length > 1
            self._pieces[value] = (
                self._build.pieces(whole, self._length, axis or 0) if split else [whole] * self._length
            )
        return self._pieces[value][position]

    def _axis(self, value: ir.Value) -> int | None:
        """Return the axis whose size is the number of sequences or a multiple of it; None if there is no such axis."""
        axes = [axis for axis, size in enumerate(sizes_of(value)) if not isinstance(size, int)]
        if value.shape is None or len(axes) > 1:
            raise UnliftedError(f"where the sequences of '{value.name}' stand is not known")
        return axes[0] if axes else None

    def _copy(self, node: ir.Node, read: Sequence[ir.Value | None], suffix: str = "") -> Sequence[ir.Value]:
        attributes, count = list(node.attributes.values()), len(node.outputs)
        name = f"{node.name}{suffix}"
        copied = ir.Node(node.domain, node.op_type, read, attributes, num_outputs=count, name=name)
        for new, old in zip(copied.outputs, node.outputs, strict=True):
            new.name, new.type = f"{old.name}{suffix}", old.type
        self.program.graph.append(copied)
        return copied.outputs

    def _number(self, value: ir.Value, count: int) -> ir.Value:
        return initializer(self.program.graph, f"{value.name}.{count}", self._sizes[count][value])

    def _to_rows(self, value: ir.Value, place: Axes) -> ir.Value:
        """Return an input as rows: its axes of positions and sequences become one."""
        if order := self._order(place):
            value = self._build.transpose(value, order)
        return self._build.reshape(value, place.still.sizes(self._batch * self._length, 0))

    def _from_rows(self, value: ir.Value, place: Axes) -> ir.Value:
        """Return an output made from rows: their axis becomes the axes of positions and sequences."""
        sizes, order = place.sizes(self._batch, self._length), self._order(place)
        if not order:
            return self._build.reshape(value, sizes)
        return self._build.transpose(
            self._build.reshape(value, [sizes[axis] for axis in order]), np.argsort(order).tolist()
        )

    def _order(self, place: Axes) -> list[int]:
        """Return an order of axes with positions directly before sequences; [] if that is the current order."""
        behind, order = place.batch or 0, list(range(len(place.shape)))
        order.remove(place.positions[0])
        order.insert(order.index(behind), place.positions[0])
        moved = [axis for axis in order if self._batch > 1 or axis != behind]  # an axis of size 1 need not move
        return order if moved != sorted(moved) else []


def _cut_sizes(model: ir.Model, counts: Sequence[int]) -> dict[int, dict[ir.Value, NDArray[Any]]]:
    """Return, for each number of sequences, the arrays of values that depend on nothing else; remove their nodes."""
    graph, is_open = model.graph, dict[ir.Value | None, bool]()
    for node in graph:
        shape = node.op_type == "Shape" and node.inputs[0] is not None and node.inputs[0].is_graph_input()
        known = [value in is_open for value in node.inputs if value is not None and value.const_value is None]
        if shape or (known and all(known)):
            is_open.update(dict.fromkeys(node.outputs, True))
    read = [value for value in is_open if value and any(use.node.outputs[0] not in is_open for use in value.uses())]
    if not read:
        return {count: {} for count in counts}
    alone, names = model.clone(), [str(value.name) for value in read]
    makers = {value.name: value for node in alone.graph for value in node.outputs}
    alone.graph.outputs[:] = [makers[name] for name in names]
    RemoveUnusedNodesPass()(alone)
    run = ReferenceEvaluator(ir.to_proto(alone))
    cut = [ir.Value(name=name, type=value.type, shape=value.shape) for name, value in zip(names, read, strict=True)]
    for value, bare in zip(read, cut, strict=True):
        ir.convenience.replace_all_uses_with(value, bare)
    RemoveUnusedNodesPass()(model)
    numbers = dict[int, dict[ir.Value, NDArray[Any]]]()
    for count in counts:
        feeds = {
            str(value.name): np.zeros([count if size == BATCH else size for size in sizes_of(value)])  # type: ignore[misc]
            for value in alone.graph.inputs
        }
        numbers[count] = dict(zip(cut, map(np.asarray, run.run(None, feeds)), strict=True))
    return numbers
