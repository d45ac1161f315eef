"""Finds axes of inputs and outputs that belong together, and whether they are positions, sequences or a fixed size.

The axes of each input are followed through the nodes. If an LSTM reads x [8, 1, 6], axis 0 of x is positions and axis 1
sequences; the same holds for axes 0 and 1 of an output y [8, 1, 2] that follows the LSTM. Axes that an operator aligns
belong together: e.g. if h [1, 16] is added to a value computed from x, the axes of h and of x.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import onnx_ir as ir

from txl_export.families.graph.find.nodes import numbers
from txl_export.families.graph.take.reading import MOST_AXES
from txl_export.families.graph.take.worker import WHOLE

KINDS = ("positions", "sequences")
Dim = tuple[Any, tuple[int, ...]]
"""An axis of a value: its size (number, symbol, or None if unknown), and the numbers of the input axes that it came
from."""
Dims = list[Dim]


@dataclass
class Kinds:
    """The axes that nodes determine, by the name of an input or output.

    Attributes:
        positions, sequences: the axis of positions and of sequences: recurrent operators decide, else convolutions.
        sizes: the size of an axis that a weight determines.
        alike: a number for each axis; axes that belong together have the same number.
    """

    positions: dict[str, int] = field(default_factory=dict)
    sequences: dict[str, int] = field(default_factory=dict)
    sizes: dict[tuple[str, int], int] = field(default_factory=dict)
    alike: dict[tuple[str, int], int] = field(default_factory=dict)


def read_axes(graph: ir.Graph, inputs: Sequence[ir.Value]) -> Kinds:
    """Return the facts about axes of inputs and outputs that a graph's nodes show."""
    return _Follow(graph, inputs).kinds()


class _Follow:
    """Tracks the axes of each value. The axes of inputs are numbered; a union-find joins axes that belong together."""

    def __init__(self, graph: ir.Graph, inputs: Sequence[ir.Value]) -> None:
        self._one, self._own, self._sizes = list[int](), list[Any](), dict[int, int]()
        self._labels, self._known = defaultdict[str, set[int]](set), dict[ir.Value, Dims]()
        for value in inputs:
            first = len(self._own)
            self._own += [size if isinstance(size, int) else size.value for size in value.shape or ()]
            self._known[value] = [(size, (at,)) for at, size in enumerate(self._own[first:], first)]
        self._one += range(len(self._own))
        self._ends = [*inputs, *graph.outputs]
        self._graph(graph)

    def kinds(self) -> Kinds:
        """Return the facts about the axes of inputs and outputs, as `read_axes` returns them."""
        kinds, roots = Kinds(), {label: {*map(self._root, axes)} for label, axes in self._labels.items()}
        strong = {root for kind in KINDS for root in roots.get(kind, ())}
        weak = {"positions": strong | roots.get("weak sequences", set()), "sequences": strong}
        both = roots.get("positions", set()) & roots.get("sequences", set())
        sizes = {self._root(axis): size for axis, size in self._sizes.items()}
        for value in self._ends:
            name, dims = str(value.name), self._known.get(value) or []
            own = {at: self._root(axes[0]) for at, (_, axes) in enumerate(dims) if len(axes) == 1}
            kinds.alike |= {(name, at): root for at, root in own.items()}
            kinds.sizes |= {(name, at): sizes[root] for at, root in own.items() if root in sizes}
            for kind in KINDS:
                for label, others in ((kind, both), (f"weak {kind}", weak[kind])):
                    axes = [at for at, root in own.items() if root in roots.get(label, set()) - others]
                    if len(axes) == 1:
                        getattr(kinds, kind).setdefault(name, axes[0])
        return kinds

    # ---- joining axes

    def _root(self, axis: int) -> int:
        while self._one[axis] != axis:
            self._one[axis] = axis = self._one[self._one[axis]]
        return axis

    def _join(self, one: Dim, two: Dim) -> Dim:
        """Join axes of equal size and return the joint axis; if an axis has size 1, return the longer axis."""
        if one[0] == 1 or two[0] == 1:
            return two if one[0] == 1 and (two[0] != 1 or not one[1]) else one
        if isinstance(one[0], int) and isinstance(two[0], int) and one[0] != two[0]:
            return None, ()
        if len(one[1]) == len(two[1]):
            for a, b in zip(one[1], two[1], strict=True):
                self._one[self._root(a)] = self._root(b)
        return (one[0] if isinstance(one[0], int) else two[0] or one[0]), one[1] or two[1]

    def _label(self, kind: str, dim: Dim) -> None:
        if len(dim[1]) == 1:
            self._labels[kind].add(dim[1][0])

    def _fix(self, dim: Dim, size: Any) -> None:
        """Record a size that a weight determines, for an axis whose size has not changed since the input."""
        if len(dim[1]) == 1 and dim[0] is not None and isinstance(size, int):
            self._sizes[dim[1][0]] = size

    # ---- nodes

    def _graph(self, graph: ir.Graph) -> None:
        for node in graph:
            if node.op_type == "If":
                for held in (each.as_graph() for each in node.attributes.values()):
                    self._graph(held)
                    for value, end in zip(node.outputs, held.outputs, strict=False):
                        if dims := self._known.get(value) or self._of(end):
                            self._known[value] = dims
            elif (node.domain in ("", "ai.onnx") or node.op_type in WHOLE) and node.op_type not in _OTHERS:
                inputs = [self._of(value) for value in node.inputs]
                with contextlib.suppress(Exception):  # a node whose parts do not fit together yields nothing
                    if inputs[0] is not None:
                        results = _RULES.get(node.op_type, _Follow._same)(self, node, inputs)
                        if max(map(len, results)) <= MOST_AXES:  # a malicious Gather can double the axes
                            self._known.update(zip(node.outputs, results, strict=False))

    def _of(self, value: ir.Value | None) -> Dims | None:
        """Return the axes of a value; None if nothing is known of them."""
        if value is None or value.const_value is None:
            return None if value is None else self._known.get(value)
        return [(size, ()) for size in value.const_value.shape.numpy()]

    def _same(self, node: ir.Node, inputs: Sequence[Any]) -> list[Dims]:
        """Handle elementwise operators, which broadcast; a normalisation has the axes of its first input."""
        known = [dims for dims in inputs[: 1 if "Normalization" in node.op_type else None] if dims is not None]
        result: Dims = [(1, ())] * max(map(len, known))
        for dims in known:
            for axis in range(1, len(dims) + 1):
                result[-axis] = self._join(result[-axis], dims[-axis])
        return [result] * len(node.outputs)

    def _recurrence(self, node: ir.Node, inputs: Sequence[Any]) -> list[Dims]:
        x, weight, late = inputs[0], inputs[1] or [(None, ())] * 3, node.attributes.get_int("layout", 0) or 0
        time, batch = x[late], x[1 - late]
        self._fix(x[2], weight[2][0])
        for start in filter(None, inputs[5:7]):
            batch = self._join(batch, start[1 - late])
        if node.attributes.get_string("direction", "forward") == "forward":
            self._label("positions", time)
        self._label("sequences", batch)
        ways, size = (weight[0][0], ()), (node.attributes.get_int("hidden_size", 0) or None, ())
        last = [batch, ways, size] if late else [ways, batch, size]
        return [[batch, time, ways, size] if late else [time, ways, batch, size], last, last]

    def _carried(self, node: ir.Node, inputs: Sequence[Any]) -> list[Dims]:
        """Handle LinearAttention of x [B, L, numbers] and CausalConvWithState of x [B, channels, L]."""
        attention, x = node.op_type == "LinearAttention", [*inputs[0]]
        for dims in filter(None, inputs[1:] if attention else inputs[3:]):
            x[0] = self._join(x[0], dims[0])
            if attention and len(dims) == 3:
                x[1] = self._join(x[1], dims[1])
        self._label("sequences", x[0])
        self._label("positions", x[1 if attention else 2])
        return [[*x[:2], (None, ())] if attention else x, *([x[0], *past[1:]] for past in inputs[3:4] if past)]

    def _convolution(self, node: ir.Node, inputs: Sequence[Any]) -> list[Dims]:
        """Handle a convolution, which is weak evidence: its axis may be frames cut from samples, or frequency bands."""
        x, channels = inputs[0], inputs[0][1]
        steps = [*node.attributes.get_ints("strides", ())] or [1] * (len(x) - 2)
        if node.op_type.startswith("Conv"):
            group, turned = node.attributes.get_int("group", 1) or 1, node.op_type == "ConvTranspose"
            ends = inputs[1][0][0], inputs[1][1][0] * group
            self._fix(channels, ends[0] if turned else ends[1])
            channels = ends[1] if turned else ends[0], ()
            self._label("weak sequences", x[0])
            if len(x) == 3:
                self._label("weak positions", x[2])
        return [
            [x[0], channels, *((None, dim[1] if step == 1 else ()) for dim, step in zip(x[2:], steps, strict=False))]
        ]

    def _sum(self, node: ir.Node, inputs: Sequence[Any]) -> list[Dims]:
        """Handle CumSum, which is weak evidence that an axis is positions."""
        self._label("weak positions", inputs[0][(numbers(node.inputs[1]) or [])[0]])
        return [inputs[0]]

    def _product(self, node: ir.Node, inputs: Sequence[Any]) -> list[Dims]:
        a, b = inputs[0], inputs[1]
        if node.op_type == "Gemm":
            a, b = (
                dims[::-1] if node.attributes.get_int(turned, 0) else dims
                for dims, turned in ((a, "transA"), (b, "transB"))
            )
        if any(axes for _, axes in b):
            self._join(a[-1], b[-2])
        else:
            self._fix(a[-1], b[-2][0])
        outer = self._same(node, [a[:-2], b[:-2]])[0] if len(a) + len(b) > 4 else []
        return [[*outer, a[-2], b[-1]]]

    def _turned(self, node: ir.Node, inputs: Sequence[Any]) -> list[Dims]:
        order = [*node.attributes.get_ints("perm", ())] or [*range(len(inputs[0]))][::-1]
        return [[inputs[0][at] for at in order]]

    def _squeezed(self, node: ir.Node, inputs: Sequence[Any]) -> list[Dims]:
        dims, axes = [*inputs[0]], _axes(node)
        if node.op_type == "Unsqueeze":
            for axis in sorted(at % (len(dims) + len(axes)) for at in axes):
                dims.insert(axis, (1, ()))
            return [dims] if axes else []
        gone = {axis % len(dims) for axis in axes} or {at for at, dim in enumerate(dims) if dim[0] == 1}
        return [[dim for at, dim in enumerate(dims) if at not in gone]]

    def _reduced(self, node: ir.Node, inputs: Sequence[Any]) -> list[Dims]:
        dims, keepdims = inputs[0], node.attributes.get_int("keepdims", 1)
        gone = {axis % len(dims) for axis in _axes(node) or range(len(dims))}
        return [[(1, ()) if at in gone else dim for at, dim in enumerate(dims) if keepdims or at not in gone]]

    def _joined(self, node: ir.Node, inputs: Sequence[Any]) -> list[Dims]:
        """Handle Concat: the joined axis continues the last part's, because new positions follow a cache."""
        known = [dims for dims in inputs if dims]
        along = (node.attributes.get_int("axis", 0) or 0) % len(known[0])
        apart = [[dim for at, dim in enumerate(dims) if at != along] for dims in known]
        (result,) = self._same(node, apart)
        return [[*result[:along], (None, known[-1][along][1]), *result[along:]]]

    def _cut(self, node: ir.Node, inputs: Sequence[Any]) -> list[Dims]:
        """Handle operators that change the size of some axes."""
        dims, axes = [*inputs[0]], [node.attributes.get_int("axis", 0) or 0]
        if node.op_type == "Slice":
            starts, axes = (numbers((*node.inputs, None, None, None)[at]) or [] for at in (1, 3))
            axes = axes or [*range(len(starts or dims))]
        elif node.op_type == "Pad":
            pads = numbers((*node.inputs, None)[1]) or [1] * 2 * len(dims)
            axes = [at for at in range(len(dims)) if pads[at] or pads[at + len(dims)]]
        for axis in axes:
            dims[axis] = None, dims[axis][1]
        return [dims] * len(node.outputs)

    def _gathered(self, node: ir.Node, inputs: Sequence[Any]) -> list[Dims]:
        dims, places, axis = inputs[0], inputs[1], (node.attributes.get_int("axis", 0) or 0) % len(inputs[0])
        return [[*dims[:axis], *places, *dims[axis + 1 :]]]

    def _reshaped(self, node: ir.Node, inputs: Sequence[Any]) -> list[Dims]:
        """Handle Reshape: [8, 1, 10] to [-1, 10] merges axes, which a later Reshape to [8, 1, 2] splits."""
        dims, target = inputs[0], numbers(node.inputs[1]) or []
        apart = [[(self._own[axis], (axis,)) for axis in dim[1]] if len(dim[1]) > 1 else [dim] for dim in dims]
        units = [unit for each in apart for unit in each]
        wanted = [dims[at][0] if size == 0 else size for at, size in enumerate(target)]
        front = _first_sizes(wanted, units)
        units.reverse()
        behind = _first_sizes(wanted[len(front) :][::-1], units)[::-1]
        left = len(wanted) - len(front) - len(behind)
        middle = [(None, _axes_of(units[::-1]))] if left == 1 else [(None, ())] * left
        return [[*front, *middle, *behind]] if target else []


def _first_sizes(wanted: Sequence[Any], units: Dims) -> Dims:
    """Match the first sizes of a Reshape with axes, up to an unclear size; take these axes out of `units`."""
    dims = Dims()
    for size in wanted:
        count = next((n for n in range(1, len(units) + 1) if _size(units[:n]) == size), 0)
        if size in (-1, None) or not (count or size == 1):
            break
        dims.append((size, _axes_of([unit for unit in units[:count] if count == 1 or unit[0] != 1])))
        del units[:count]
    return dims


def _size(units: Sequence[Dim]) -> Any:
    """Return the product of the sizes of axes; for one axis its size, even a symbol; None if a size is unknown."""
    sizes = [size for size, _ in units]
    return sizes[0] if len(sizes) == 1 else prod(sizes) if all(isinstance(size, int) for size in sizes) else None


def _axes_of(units: Sequence[Dim]) -> tuple[int, ...]:
    return tuple(axis for _, axes in units for axis in axes)


def _axes(node: ir.Node) -> list[int]:
    """Return the axes that a node names: in attributes, or since opset 13 in an input."""
    one = node.attributes.get_int("axis", None)
    return [*node.attributes.get_ints("axes", ())] or numbers((*node.inputs, None)[1]) or ([] if one is None else [one])


_OTHERS = frozenset(
    re.findall(
        r"\w+",
        "Shape Size NonZero Range ConstantOfShape Einsum Resize TopK OneHot DepthToSpace SpaceToDepth DFT "
        "GatherND Tile Expand Compress Unique Loop Scan NonMaxSuppression RoiAlign GridSample Det Upsample Attention "
        "Flatten STFT",
    )
)
"""Operators through which axes are not followed."""
_BY_RULE: Mapping[str, Callable[[_Follow, ir.Node, Sequence[Any]], list[Dims]]] = {
    "LSTM GRU RNN": _Follow._recurrence,
    "LinearAttention CausalConvWithState": _Follow._carried,
    "Conv ConvTranspose MaxPool AveragePool LpPool": _Follow._convolution,
    "CumSum": _Follow._sum,
    "MatMul Gemm": _Follow._product,
    "Transpose": _Follow._turned,
    "Squeeze Unsqueeze": _Follow._squeezed,
    "ReduceSum ReduceMean ReduceMax ReduceMin ReduceL1 ReduceL2 ReduceSumSquare ArgMax ArgMin": _Follow._reduced,
    "Concat": _Follow._joined,
    "Slice Split Pad": _Follow._cut,
    "Gather": _Follow._gathered,
    "Reshape": _Follow._reshaped,
}
_RULES = {op: rule for ops, rule in _BY_RULE.items() for op in ops.split()}
