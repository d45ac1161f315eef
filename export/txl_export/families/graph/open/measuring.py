"""Measures sizes, dtypes and constants of a graph's values: folds copies that have numbers for open sizes.

ONNX Runtime computes the sizes, in the helper process. A shape inference in this process could be attacked: for 23
nodes that each append a shape to itself it makes 2.5 GB.
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
"""Largest int64: the end of a Slice that reaches the end of an axis."""
Fold = Callable[[ir.Model], ir.Model]
"""Computes the constants of a graph in the helper process; returns a new graph."""
_OPERATORS = {"Conv", "ConvTranspose", "CumSum", "Range", "Loop", "Scan", "Slice", "Reshape", "Pad", *RECURRENT}
_POSITIONS = ((3840, 11520), (240, 720))
"""Numbers of positions for a segment whose length is open, two for each of two tries. The first pair is longer than any
kernel, and whole frames of audio. The second pair is shorter, for graphs with a table that has a row for each position.
"""
_SMALL = 2**16
"""Maximum number of values of a constant that is sent to the helper; for a larger constant only its shape is sent."""


@dataclass(frozen=True)
class _Measured:
    """Sizes and dtype of a value, each None if it is unknown, and the value's content if it is constant."""

    sizes: tuple[int | None, ...] = ()
    dtype: ir.DataType | None = None
    constant: NDArray[Any] | None = None


_NOTHING = _Measured()


class Sizes:
    """Sizes of inputs and results of some operators, in the graph as it was when this object was made.

    Args:
        model: the graph; it is not changed.
        segment: the axis of positions by the name of an input; {} if unknown.
        fold: computes constants of a graph.
        more: additional values to measure.

    Raises:
        EndedError: the helper process died on the graph.
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
        """Return the sizes of a value: a text for an open size, None for an unknown size; () if nothing is known."""
        if value is not None and value.const_value is not None:
            return tuple(value.const_value.shape.numpy())
        one, two = (run.get(value, _NOTHING).sizes for run in (self._short, self._other))
        return tuple(self._size_of(a, b) for a, b in zip(one, two, strict=False))

    def _size_of(self, one: int | None, two: int | None) -> Size | None:
        """Return a number that two measurements agree on, or the symbol that had these numbers in both; else None."""
        names = [symbols.get(number or 0) for symbols, number in zip(self._symbols, (one, two), strict=True)]
        return one if one == two else names[0] if names[0] == names[1] else None

    def same(self, value: ir.Value, other: ir.Value) -> None:
        """Copy all facts about `other` to `value`, which replaces it."""
        for run in (self._short, self._other, self._long):
            if other in run:
                run[value] = run[other]

    def dtype(self, value: ir.Value | None) -> ir.DataType:
        """Return a value's dtype; float32 if it is unknown."""
        return self._short.get(value, _NOTHING).dtype or ir.DataType.FLOAT

    def constant(self, value: ir.Value | None) -> NDArray[Any] | None:
        """Return the content of a constant; if it depends on sizes, the content for one choice of sizes; else None.

        For example, the int64 [3] that a Reshape reads as its shape.
        """
        known = None if value is None else value.const_value
        return self._short.get(value, _NOTHING).constant if known is None else known.numpy()

    def follows(self, value: ir.Value | None, axis: int) -> bool | None:
        """Return whether an axis grows with the segment; None if that is unknown."""
        one, two = ((*run.get(value, _NOTHING).sizes, *[None] * 9)[axis] for run in (self._short, self._long))
        return None if one is None or two is None else one != two

    def less(self, value: ir.Value, cut: ir.Value, axis: int) -> Size | None:
        """Return by how many rows `cut` is shorter than `value` along an axis; None if that is unknown."""
        runs = [[run.get(end, _NOTHING).sizes for end in (value, cut)] for run in (self._short, self._other)]
        run = [(one[axis] or 0) - (two[axis] or 0) for one, two in runs if len(one) == len(two) > axis]
        return self._size_of(run[0], run[1]) if len(run) == 2 else None

    def _is_fixed(self, node: ir.Node) -> bool:
        """Return whether a node hides its input's length: a Reshape to [B, 7, 6], or a Slice up to 7."""
        if node.op_type != "Reshape" and (node.op_type != "Slice" or numbers(node.inputs[1]) != [0]):
            return False
        (entry, longer), (result, same) = (
            [run.get(end, _NOTHING).sizes for run in (self._short, self._long)]
            for end in (node.inputs[0], node.outputs[0])
        )
        return entry != longer and result == same and bool(result) and None not in result


def _measured(
    model: ir.Model,
    segment: Mapping[str, int],
    fold: Fold,
    values: Iterable[ir.Value],
    length: int,
    times: int,
    attempt: int,
) -> dict[ir.Value | None, _Measured]:
    """Measure values of the outer graph; {} if it does not run with these sizes.

    Args:
        model, segment, fold: as in `Sizes`.
        values: the values to measure.
        length: the number of positions of a segment, if the graph leaves it open.
        times: the factor on the number of positions, if the graph fixes it.
        attempt: selects the numbers for other open sizes.

    Raises:
        EndedError: the helper process died on the graph.
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
    # ONNX Runtime writes inferred shapes only if it changes the graph: the Identity of this constant is always removed.
    for at, end in enumerate([*asked.values(), initializer(graph, "measured.is.0", np.int64(0))]):
        shown = ir.node("Identity", [end])
        shown.outputs[0].name = f"measured.{at}"
        graph.append(shown)
        graph.outputs.append(shown.outputs[0])
    try:
        results = fold(copy).graph.outputs if asked else ()
    except RunError:  # the sizes contradict each other
        return {}
    return {
        value: _Measured(
            tuple(size if isinstance(size, int) else None for size in end.shape or ()),
            end.dtype,
            None if end.const_value is None else end.const_value.numpy(),
        )
        for value, end in zip(asked, results, strict=False)
    }


def _numbers(graph: ir.Graph, segment: Mapping[str, int], attempt: int) -> dict[Size, int]:
    """Return numbers for open sizes other than positions.

    The numbers of a symbol in two attempts differ by an amount that no other symbol has, so that they identify it. A
    sum such as "past + 1" is computed from its parts.
    """
    sizes = {(value.name, axis): _size(value, axis) for value in graph.inputs for axis in range(len(value.shape or ()))}
    along = {sizes.get(place) for place in segment.items()}
    others = (size for size in dict.fromkeys(sizes.values()) if isinstance(size, str) and size not in along)
    # the numbers are 7, 11, 17, 25 and so on
    numbers: dict[Size, int] = {size: at * at + 3 * at + 7 for at, size in enumerate(others, attempt)}
    for symbol in numbers:
        parts = [part.strip() for part in str(symbol).split("+")]
        if len(parts) > 1 and all(part.isdecimal() or part in numbers for part in parts):
            numbers[symbol] = sum(int(part) if part.isdecimal() else numbers[part] for part in parts)
    return numbers


def _size(value: ir.Value, axis: int) -> Size:
    """Return the size of an axis of an input; for an open size, the name that `reading` gives it."""
    size = None if value.shape is None else value.shape[axis]
    return size if isinstance(size, int) else (size and size.value) or f"input {value.name} axis {axis}"
