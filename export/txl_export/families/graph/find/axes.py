"""Which axes of a graph's inputs and outputs are one, and what its nodes say of them: positions, sequences, sizes.

Each axis of an input is followed forward: x [8, 1, 6] that an LSTM reads has positions on axis 0 and sequences on axis
1, and so has y [8, 1, 2] behind it. An axis that operators join, as when h [1, 16] is added to what x became, is one
with the other.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import onnx_ir as ir

FEW = 64
"""Numbers of a constant that are looked at: of a larger one its sizes are enough."""
_OTHERS = frozenset(
    re.findall(
        r"\w+",
        "Shape Size NonZero Range ConstantOfShape Einsum Resize TopK OneHot DepthToSpace SpaceToDepth DFT STFT GatherND "
        "Tile Compress Unique Loop NonMaxSuppression RoiAlign GridSample Det Upsample ScatterND Attention",
    )
)
"""Operators whose results' axes are not followed."""
KINDS = ("positions", "sequences")
Dim = tuple[int | str | None, tuple[int, ...]]
"""A size, a symbol, or None where it is not known; and the axes that it was made of, as numbers of `_Follow`."""


@dataclass
class Kinds:
    """What the nodes say of axes, each as the name of an input or output with its number.

    Attributes:
        positions, sequences: where a recurrent operator or a convolution has them.
        sizes: of axes that a weight decides.
        alike: axes that are one have one number.
    """

    positions: dict[str, int] = field(default_factory=dict)
    sequences: dict[str, int] = field(default_factory=dict)
    sizes: dict[tuple[str, int], int] = field(default_factory=dict)
    alike: dict[tuple[str, int], int] = field(default_factory=dict)


def read_axes(graph: ir.Graph, inputs: Sequence[ir.Value]) -> Kinds:
    """Follow the axes of a graph's inputs through its nodes."""
    return _Follow(graph, inputs).found()


class _Follow:
    def __init__(self, graph: ir.Graph, inputs: Sequence[ir.Value]) -> None:
        self._one, self._own = list[int](), list[int | str | None]()
        self._labels = defaultdict[str, set[int]](set)
        self._sizes = dict[int, int]()
        self._known = dict[ir.Value, list[Dim]]()
        for value in inputs:
            sizes = [size if isinstance(size, int) else size.value for size in value.shape or ()]
            first = len(self._one)
            self._one += range(first, first + len(sizes))
            self._own += sizes
            self._known[value] = [(size, (first + axis,)) for axis, size in enumerate(sizes)]
        self._ends = [*inputs, *graph.outputs]
        self._graph(graph)

    def found(self) -> Kinds:
        """See `read_axes`."""
        kinds, roots = Kinds(), {label: {self._root(atom) for atom in atoms} for label, atoms in self._labels.items()}
        both = roots.get("positions", set()) & roots.get("sequences", set())
        sizes = {self._root(atom): size for atom, size in self._sizes.items()}
        for value in self._ends:
            name, dims = str(value.name), self._known.get(value) or []
            own = {axis: self._root(atoms[0]) for axis, (_, atoms) in enumerate(dims) if len(atoms) == 1}
            kinds.alike |= {(name, axis): root for axis, root in own.items()}
            kinds.sizes |= {(name, axis): sizes[root] for axis, root in own.items() if root in sizes}
            strong = {axis for axis, root in own.items() if any(root in roots.get(kind, ()) for kind in KINDS)}
            for kind in KINDS:
                for label, left in ((kind, {*own}), (f"weak {kind}", {*own} - strong)):
                    axes = [axis for axis in left if own[axis] in roots.get(label, set()) - both]
                    if len(axes) == 1:
                        getattr(kinds, kind).setdefault(name, axes[0])
        return kinds

    # ---- axes that are one

    def _root(self, atom: int) -> int:
        while self._one[atom] != atom:
            self._one[atom] = atom = self._one[self._one[atom]]
        return atom

    def _join(self, one: Dim, two: Dim) -> Dim:
        """What two axes of one size become; where one is repeated along the other, the other."""
        if one[0] == 1 or two[0] == 1:
            return two if one[0] == 1 and (two[0] != 1 or not one[1]) else one
        if len(one[1]) == len(two[1]):
            for a, b in zip(one[1], two[1], strict=True):
                self._one[self._root(a)] = self._root(b)
        size = next((size for size, _ in (one, two) if isinstance(size, int)), one[0] or two[0])
        return size, one[1] or two[1]

    def _label(self, kind: str, dim: Dim, weak: bool = False) -> None:
        """Note what an axis is of; a convolution says it weakly, which may run over what a call alone has."""
        if len(dim[1]) == 1:
            self._labels[f"weak {kind}" if weak else kind].add(dim[1][0])

    def _fix(self, dim: Dim, size: int) -> None:
        if len(dim[1]) == 1 and dim[0] is not None:
            self._sizes[dim[1][0]] = size

    # ---- nodes

    def _graph(self, graph: ir.Graph) -> None:
        for node in graph:
            held = [each.as_graph() for each in node.attributes.values() if each.type == ir.AttributeType.GRAPH]
            given = [self._of(value) for value in node.inputs]
            if node.op_type == "If":
                for each in held:
                    self._graph(each)
                    for value, end in zip(node.outputs, each.outputs, strict=False):
                        self._known[value] = self._known.get(value) or self._of(end) or []
            elif node.op_type == "Scan":
                self._scan(node, given)
            elif node.op_type not in _OTHERS and node.outputs:
                rule = _RULES.get(node.op_type, _Follow._same)
                with contextlib.suppress(Exception):  # of a node whose parts do not fit together nothing is known
                    if node.domain in ("", "ai.onnx") and given[0] is not None:
                        self._known.update(zip(node.outputs, rule(self, node, given), strict=False))

    def _of(self, value: ir.Value | None) -> list[Dim] | None:
        """The axes of a value; None where nothing is known of them."""
        if value is None or value.const_value is None:
            return None if value is None else self._known.get(value)
        return [(size, ()) for size in value.const_value.shape.numpy()]

    def _scan(self, node: ir.Node, given: Sequence[list[Dim] | None]) -> None:
        count = node.attributes.get_int("num_scan_inputs", 0) or 0
        firsts = [dims[0] for dims in given[len(given) - count :] if dims]
        for first in firsts[:1]:
            self._label("positions", first)
            for value in node.outputs[len(given) - count :]:
                self._known[value] = [first, *[(None, ())] * (len(value.shape or (0,)) - 1)]

    def _same(self, node: ir.Node, given: Sequence[list[Dim] | None]) -> list[list[Dim]]:
        """Operators that work on each number, repeating what is short."""
        known = [dims for dims in given if dims is not None]
        result = [(1, ())] * max(map(len, known))
        for dims in known:
            for axis in range(1, len(dims) + 1):
                result[-axis] = self._join(result[-axis], dims[-axis])
        return [result] * len(node.outputs)

    def _first(self, node: ir.Node, given: Sequence[list[Dim] | None]) -> list[list[Dim]]:
        return [[*(given[0] or [])]] * len(node.outputs)

    def _recurrence(self, node: ir.Node, given: Sequence[list[Dim] | None]) -> list[list[Dim]]:
        x, w = given[0] or [], (given[1] if len(given) > 1 else None) or []
        if len(x) != 3:
            return []
        late = node.attributes.get_int("layout", 0) or 0
        time, batch = x[late], x[1 - late]
        if len(w) == 3 and isinstance(w[2][0], int):
            self._fix(x[2], w[2][0])
        if node.attributes.get_string("direction", "forward") == "forward":
            self._label("positions", time)
        for start in given[5:7]:
            if start and len(start) == 3:
                batch = self._join(batch, start[0 if late else 1])
        self._label("sequences", batch)
        ways, size = (w[0] if w else (None, ())), (node.attributes.get_int("hidden_size", 0) or None, ())
        last = [batch, ways, size] if late else [ways, batch, size]
        return [[batch, time, ways, size] if late else [time, ways, batch, size], last, last]

    def _convolution(self, node: ir.Node, given: Sequence[list[Dim] | None]) -> list[list[Dim]]:
        x, w = given[0] or [], (given[1] if len(given) > 1 else None) or []
        steps = [*node.attributes.get_ints("strides", ())] or [1] * (len(x) - 2)
        channels: Dim = x[1]
        if node.op_type.startswith("Conv"):
            ends = [w[0][0], w[1][0]]
            if not all(isinstance(size, int) for size in ends):
                return []
            group, turned = node.attributes.get_int("group", 1) or 1, node.op_type == "ConvTranspose"
            self._fix(x[1], ends[0] if turned else ends[1] * group)
            channels = (ends[1] * group if turned else ends[0], ())
            self._label("sequences", x[0], weak=True)
            if len(x) == 3:
                self._label("positions", x[2], weak=True)
        return [
            [x[0], channels, *((None, dim[1] if step == 1 else ()) for dim, step in zip(x[2:], steps, strict=True))]
        ]

    def _product(self, node: ir.Node, given: Sequence[list[Dim] | None]) -> list[list[Dim]]:
        a, b = [*(given[0] or [])], given[1]
        if b is None or len(a) < 2 or len(b) < 2:
            return []
        if node.op_type == "Gemm":
            a = a[::-1] if node.attributes.get_int("transA", 0) else a
            b = b[::-1] if node.attributes.get_int("transB", 0) else b
        inner, rows, columns = b[-2], a[-2], b[-1]
        if isinstance(inner[0], int) and node.inputs[1].const_value is not None:
            self._fix(a[-1], inner[0])
        elif a[-1][1]:
            self._join(a[-1], inner)
        (outer,) = self._same(node, [a[:-2], b[:-2]])[:1]
        result = [*outer, rows, columns]
        return self._same(node, [result, given[2]]) if len(given) > 2 else [result]

    def _turned(self, node: ir.Node, given: Sequence[list[Dim] | None]) -> list[list[Dim]]:
        dims = given[0] or []
        order = [*node.attributes.get_ints("perm", ())] or [*range(len(dims))][::-1]
        return [[dims[at] for at in order]] if sorted(order) == [*range(len(dims))] else []

    def _squeezed(self, node: ir.Node, given: Sequence[list[Dim] | None]) -> list[list[Dim]]:
        dims, axes = [*(given[0] or [])], _axes(node, 1)
        if node.op_type == "Unsqueeze":
            rank = len(dims) + len(axes)
            for axis in sorted(at % rank for at in axes):
                dims.insert(axis, (1, ()))
            return [dims] if axes else []
        gone = {axis % len(dims) for axis in axes} or {at for at, dim in enumerate(dims) if dim[0] == 1}
        return [[dim for at, dim in enumerate(dims) if at not in gone]]

    def _reduced(self, node: ir.Node, given: Sequence[list[Dim] | None]) -> list[list[Dim]]:
        dims = [*(given[0] or [])]
        axes = (
            _axes(node, 1) or [node.attributes.get_int("axis", 0)] * node.op_type.startswith("Arg") or range(len(dims))
        )
        gone, kept = {axis % len(dims) for axis in axes}, node.attributes.get_int("keepdims", 1)
        return [[(1, ()) if at in gone else dim for at, dim in enumerate(dims) if kept or at not in gone]]

    def _joined(self, node: ir.Node, given: Sequence[list[Dim] | None]) -> list[list[Dim]]:
        known = [dims for dims in given if dims]
        rank, result = len(known[0]), [*known[0]]
        along = (node.attributes.get_int("axis", 0) or 0) % rank
        for dims in known[1:]:
            for axis, dim in enumerate(dims[:rank]):
                if axis != along:
                    result[axis] = self._join(result[axis], dim)
        ends = {self._root(atoms[0]) for dims in known for _, atoms in [dims[along]] if len(atoms) == 1}
        # A cache before what is new: the new part's axis goes on, which is read behind the cache.
        result[along] = (None, known[-1][along][1] if ends else ())
        return [result]

    def _cut(self, node: ir.Node, given: Sequence[list[Dim] | None]) -> list[list[Dim]]:
        """Some axes have another size than before."""
        dims = [*(given[0] or [])]
        if node.op_type == "Slice":
            starts, axes = numbers((*node.inputs, None, None)[1]), numbers((*node.inputs, None, None, None)[3])
            axes = axes if axes is not None else [*range(len(starts or dims))]
        elif node.op_type == "Split":
            axes = [node.attributes.get_int("axis", 0) or 0]
        else:
            pads = [*node.attributes.get_ints("pads", ())] or numbers((*node.inputs, None)[1]) or [1] * 2 * len(dims)
            axes = [at for at in range(len(pads) // 2) if pads[at] or pads[at + len(pads) // 2]]
        for axis in axes:
            if -len(dims) <= axis < len(dims):
                dims[axis] = (None, dims[axis][1])
        return [dims] * len(node.outputs)

    def _gathered(self, node: ir.Node, given: Sequence[list[Dim] | None]) -> list[list[Dim]]:
        dims, places = given[0] or [], self._of(node.inputs[1]) if len(node.inputs) > 1 else None
        axis = (node.attributes.get_int("axis", 0) or 0) % max(len(dims), 1)
        return [] if places is None else [[*dims[:axis], *places, *dims[axis + 1 :]]]

    def _expanded(self, node: ir.Node, given: Sequence[list[Dim] | None]) -> list[list[Dim]]:
        sizes = numbers((*node.inputs, None)[1])
        return self._same(node, [given[0], [(size, ()) for size in sizes]]) if sizes else []

    def _flat(self, node: ir.Node, given: Sequence[list[Dim] | None]) -> list[list[Dim]]:
        dims, axis = given[0] or [], node.attributes.get_int("axis", 1) or 0
        parts = dims[:axis], dims[axis:]
        return [[(_size(part) if part else 1, tuple(atom for _, atoms in part for atom in atoms)) for part in parts]]

    def _reshaped(self, node: ir.Node, given: Sequence[list[Dim] | None]) -> list[list[Dim]]:
        dims, target = given[0] or [], numbers((*node.inputs, None)[1])
        if target is None:
            return []
        units = [unit for dim in dims for unit in self._units(dim)]
        wanted = [dims[at][0] if size == 0 and at < len(dims) else size for at, size in enumerate(target)]
        front = self._taken(wanted, units)
        units.reverse()
        behind = self._taken(wanted[len(front) :][::-1], units, last=True)[::-1]
        middle = len(wanted) - len(front) - len(behind)
        if middle == 1:
            front.append((None, tuple(atom for _, atoms in units[::-1] for atom in atoms)))
        return [[*front, *[(None, ())] * (middle if middle > 1 else 0), *behind]]

    def _units(self, dim: Dim) -> list[Dim]:
        return [(self._own[atom], (atom,)) for atom in dim[1]] if len(dim[1]) > 1 else [dim]

    def _taken(self, wanted: Sequence[int | str | None], units: list[Dim], last: bool = False) -> list[Dim]:
        """The axes that the first sizes of a Reshape are made of, up to one that cannot be told, and without them."""
        found = list[Dim]()
        for size in wanted:
            count = next((n for n in range(1, len(units) + 1) if _size(units[:n]) == size), 0)
            if size in (-1, None) or not (count or size == 1):
                break
            part, units[:count] = units[:count][:: -1 if last else 1], []
            found.append((size, tuple(atom for unit, atoms in part for atom in atoms if count == 1 or unit != 1)))
        return found


def _size(units: Sequence[Dim]) -> int | str | None:
    """How many numbers axes have together; a symbol where there is one."""
    sizes = [size for size, _ in units]
    return sizes[0] if len(sizes) == 1 else prod(sizes) if all(isinstance(size, int) for size in sizes) else None


def _axes(node: ir.Node, at: int) -> list[int]:
    """The axes that a node is given as an attribute, or as an input since opset 13."""
    return [*node.attributes.get_ints("axes", ())] or numbers((*node.inputs, None, None)[at]) or []


def numbers(value: ir.Value | None) -> list[int] | None:
    """A small constant of whole numbers as a list; None for what is none."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size > FEW or not tensor.dtype.is_integer():
        return None
    return [int(number) for number in tensor.numpy().ravel()]


_RULES: Mapping[str, Callable[[_Follow, ir.Node, Sequence[list[Dim] | None]], list[list[Dim]]]] = {
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _Follow._recurrence),
    **dict.fromkeys(("Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"), _Follow._convolution),
    **dict.fromkeys(("MatMul", "Gemm"), _Follow._product),
    **dict.fromkeys(("Squeeze", "Unsqueeze"), _Follow._squeezed),
    **dict.fromkeys(("Slice", "Split", "Pad"), _Follow._cut),
    **dict.fromkeys(
        (
            f"Reduce{kind}"
            for kind in ("Sum", "Mean", "Max", "Min", "L1", "L2", "Prod", "SumSquare", "LogSum", "LogSumExp")
        ),
        _Follow._reduced,
    ),
    **dict.fromkeys(("ArgMax", "ArgMin"), _Follow._reduced),
    **dict.fromkeys(
        ("BatchNormalization", "LayerNormalization", "InstanceNormalization", "CumSum", "Trilu"), _Follow._first
    ),
    "Transpose": _Follow._turned,
    "Concat": _Follow._joined,
    "Gather": _Follow._gathered,
    "Expand": _Follow._expanded,
    "Flatten": _Follow._flat,
    "Reshape": _Follow._reshaped,
}
