"""Sizes, types and constants of a graph's values, measured: copies of it with sizes that are numbers are folded.

ONNX Runtime follows sizes through what is computed of them. It does so in the helper process: of 23 nodes that each put
a shape behind itself, a shape inference that follows values makes 2.5 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from txl_export.families.graph.find.nodes import RECURRENT, numbers
from txl_export.families.graph.take.reading import Size
from txl_export.families.graph.take.running import RunError
from txl_export.graphs.quantised_matmul import initializer

END = 2**63 - 1
"""The end of an axis in a Slice."""
Fold = Callable[[ir.Model], ir.Model]
"""Computes what is always the same in a graph, in the helper process, and returns a new graph."""
_OPERATORS = {"Conv", "ConvTranspose", "CumSum", "Range", "Loop", "Scan", "Slice", "Reshape", "Pad", *RECURRENT}
_POSITIONS = ((3840, 11520), (240, 720))
"""Positions of a segment whose length is open, in two attempts: more than kernels have, and whole frames of audio; then
fewer, of a graph that has a table with a row for each.
"""
_SMALL = 2**16
"""Numbers of a constant that go to the helper; of a larger one its sizes do."""


@dataclass(frozen=True)
class _Measured:
    """A value's sizes and type, None where one is not known, and what it is where that is always the same."""

    sizes: tuple[int | None, ...] = ()
    dtype: ir.DataType | None = None
    constant: NDArray[Any] | None = None


_NOTHING = _Measured()


class Sizes:
    """Sizes of a graph as it was when this was made, of what some operators take and return.

    Args:
        model: the graph; it stays as it is.
        segment: by name of an input, its axis of positions; empty where that is not known.
        fold: computes what is always the same.
        more: values that are measured beside those of some operators.

    Raises:
        EndedError: the helper died of the graph.
    """

    def __init__(self, model: ir.Model, segment: Mapping[str, int], fold: Fold, more: Iterable[ir.Value] = ()) -> None:
        nodes = [node for node in model.graph if node.op_type in _OPERATORS]
        values = [end for node in nodes for end in (*node.inputs, *node.outputs[:1]) if end is not None] + [*more]
        for lengths in _POSITIONS:
            self._short, self._other, self._long = (
                _measured(model, segment, fold, values, lengths[attempt] * times, times, attempt)
                if segment or times == 1
                else {}
                for times, attempt in ((1, 0), (1, 1), (2, 0))
            )
            if self._short and (self._long or not segment):
                break
        self._symbols = [
            {number: size for size, number in _numbers(model.graph, segment, attempt).items()} for attempt in (0, 1)
        ]
        if any(self._is_fixed(node) for node in nodes):
            self._long = {}

    def of(self, value: ir.Value | None) -> tuple[Size | None, ...]:
        """The sizes of a value: a text is an open one, None is not known; empty where nothing is."""
        if value is not None and value.const_value is not None:
            return tuple(value.const_value.shape.numpy())
        one, two = (found.get(value, _NOTHING).sizes for found in (self._short, self._other))
        return tuple(self._told(a, b) for a, b in zip(one, two, strict=False))

    def _told(self, one: int | None, two: int | None) -> Size | None:
        """A number that two attempts agree on, or the symbol that both had numbers for."""
        names = [symbols.get(number or 0) for symbols, number in zip(self._symbols, (one, two), strict=True)]
        return one if one == two else names[0] if names[0] == names[1] else None

    def same(self, value: ir.Value, other: ir.Value) -> None:
        """Let what is known of one value be known of a new one, which stands where it stood."""
        for found in (self._short, self._other, self._long):
            if other in found:
                found[value] = found[other]

    def dtype(self, value: ir.Value | None) -> ir.DataType:
        """The type of a value's numbers; float32 where it is not known."""
        return self._short.get(value, _NOTHING).dtype or ir.DataType.FLOAT

    def constant(self, value: ir.Value | None) -> NDArray[Any] | None:
        """A value that is always the same but for its sizes, as it is with some sizes; None where it is not."""
        known = None if value is None else value.const_value
        return self._short.get(value, _NOTHING).constant if known is None else known.numpy()

    def follows(self, value: ir.Value | None, axis: int) -> bool | None:
        """True where an axis becomes longer with the segment; None where that cannot be told."""
        one, two = ((*found.get(value, _NOTHING).sizes, *[None] * 9)[axis] for found in (self._short, self._long))
        return None if one is None or two is None else one != two

    def less(self, value: ir.Value, cut: ir.Value, axis: int) -> Size | None:
        """The rows by which an axis of `cut` is shorter than that of `value`; None where that is not known."""
        runs = [[found.get(end, _NOTHING).sizes for end in (value, cut)] for found in (self._short, self._other)]
        found = [(one[axis] or 0) - (two[axis] or 0) for one, two in runs if len(one) == len(two) > axis]
        return self._told(found[0], found[1]) if len(found) == 2 else None

    def _is_fixed(self, node: ir.Node) -> bool:
        """True where a Reshape to [B, 7, 6], or a Slice up to 7, hides that its input is longer than 7 positions."""
        if node.op_type != "Reshape" and (node.op_type != "Slice" or numbers(node.inputs[1]) != [0]):
            return False
        (given, longer), (made, same) = (
            [found.get(end, _NOTHING).sizes for found in (self._short, self._long)]
            for end in (node.inputs[0], node.outputs[0])
        )
        return given != longer and made == same and bool(made) and None not in made


def _measured(
    model: ir.Model,
    segment: Mapping[str, int],
    fold: Fold,
    values: Iterable[ir.Value],
    length: int,
    times: int,
    attempt: int,
) -> dict[ir.Value | None, _Measured]:
    """Measure values of the outer graph, for an open length and for `times` the positions that it fixes; other open
    sizes have the numbers of an attempt. Nothing where the graph does not run with these.

    Raises:
        EndedError: the helper died of the graph.
    """
    graph = (copy := model.clone()).graph
    numbers = _numbers(graph, segment, attempt)
    along = {_size(value, segment[str(value.name)]) for value in graph.inputs if value.name in segment}
    for value in (output for node in graph.all_nodes() for output in node.outputs):
        value.shape = None
    for value in graph.inputs:
        sizes = [_size(value, axis) for axis in range(len(value.shape or ()))]
        positions = [
            segment.get(str(value.name)) == axis or (isinstance(size, str) and size in along)
            for axis, size in enumerate(sizes)
        ]
        value.shape = value.shape and ir.Shape(
            (size * times if moves else size) if isinstance(size, int) else length if moves else numbers[size]
            for size, moves in zip(sizes, positions, strict=True)
        )
    for name, value in list(graph.initializers.items()):
        if value.const_value is not None and value.const_value.size > _SMALL:
            value.type, value.shape = ir.TensorType(value.const_value.dtype), ir.Shape(value.const_value.shape.numpy())
            del graph.initializers[name]
            value.const_value = None
            graph.inputs.append(value)
    twins = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    asked = {value: twins[str(value.name)] for value in values if value.const_value is None and value.name in twins}
    graph.outputs.clear()
    # ONNX Runtime notes what it has inferred of a graph that it changes alone: a constant's copy always goes.
    for at, end in enumerate([*asked.values(), initializer(graph, "measured.is.0", np.int64(0))]):
        shown = ir.node("Identity", [end])
        shown.outputs[0].name = f"measured.{at}"
        graph.append(shown)
        graph.outputs.append(shown.outputs[0])
    try:
        found = fold(copy).graph.outputs if asked else ()
    except RunError:  # the sizes do not go together
        return {}
    return {
        value: _Measured(
            tuple(size if isinstance(size, int) else None for size in end.shape or ()),
            end.dtype,
            None if end.const_value is None else end.const_value.numpy(),
        )
        for value, end in zip(asked, found, strict=False)
    }


def _numbers(graph: ir.Graph, segment: Mapping[str, int], attempt: int) -> dict[Size, int]:
    """Numbers for open sizes that are not of positions, no two as far apart as in another attempt: "past + 1" has one
    more than "past".
    """
    sizes = {(value.name, axis): _size(value, axis) for value in graph.inputs for axis in range(len(value.shape or ()))}
    along = {sizes.get(place) for place in segment.items()}
    others = (size for size in dict.fromkeys(sizes.values()) if isinstance(size, str) and size not in along)
    numbers: dict[Size, int] = {size: at * at + 3 * at + 7 for at, size in enumerate(others, attempt)}  # 7, 11, 17, 25
    for symbol in numbers:
        parts = [part.strip() for part in str(symbol).split("+")]
        if len(parts) > 1 and all(part.isdecimal() or part in numbers for part in parts):
            numbers[symbol] = sum(int(part) if part.isdecimal() else numbers[part] for part in parts)
    return numbers


def _size(value: ir.Value, axis: int) -> Size:
    """The size of an input, an open one by the name that `reading` has for it."""
    size = None if value.shape is None else value.shape[axis]
    return size if isinstance(size, int) else (size and size.value) or f"input {value.name} axis {axis}"
