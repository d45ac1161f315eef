"""Sizes, types and constants of a graph's values, measured: copies of it with sizes that are numbers are folded.

ONNX Runtime follows sizes through what is computed of them. It does so in the helper process: of 23 nodes that each put
a shape behind itself, a shape inference that follows values makes 2.5 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from txl_export.families.graph.take.reading import Size
from txl_export.families.graph.take.running import RunError
from txl_export.graphs.quantised_matmul import initializer

Fold = Callable[[ir.Model], ir.Model]
"""Computes what is always the same in a graph, in the helper process, and returns another graph."""

RECURRENT = {"LSTM": 2, "GRU": 1, "RNN": 1}
"""Operators that carry states along a sequence, and how many, which start from their sixth input and the next one."""
_OPERATORS = frozenset(
    {"Conv", "ConvTranspose", "CumSum", "Range", "Loop", "Scan", "Slice", "Reshape", "Pad", *RECURRENT}
)
_POSITIONS = (3840, 11520)
"""Positions of a segment whose length is open, in two attempts: more than kernels have, and whole frames of audio."""
_PRIMES = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
"""Numbers that stand for other open sizes, by which these are recognised; in the second attempt each for the next."""
_SMALL = 2**16
"""Numbers of a constant that go to the helper; of a larger one its sizes do."""


@dataclass
class Measured:
    """What is known of a value.

    Attributes:
        sizes: None where one is not known; empty where nothing is.
        dtype: of its numbers; None where it is not known.
        constant: what it always is with these sizes; None where it is not always the same.
        symbols: open sizes by the numbers that stood for them.
    """

    sizes: tuple[int | None, ...] = ()
    dtype: ir.DataType | None = None
    constant: NDArray[Any] | None = None
    symbols: Mapping[int, Size] = field(default_factory=dict)


class Sizes:
    """Sizes of a graph as it was when this was made, of what some operators take and return.

    Args:
        model: the graph; it stays as it is.
        segment: by name of an input, its axis of positions; empty where no axis is one, None where that is not known.
        fold: computes what is always the same.

    Raises:
        EndedError: the helper died of the graph.
    """

    def __init__(self, model: ir.Model, segment: Mapping[str, int] | None, fold: Fold) -> None:
        how = ((1, 0), (1, 1), (2, 0) if segment else (1, 0))
        nodes = [node for node in model.graph if node.op_type in _OPERATORS]
        values = [end for node in nodes for end in (*node.inputs, *node.outputs[:1]) if end is not None]
        self._short, self._other, self._long = (
            measure(model, segment or {}, fold, values, *each) if values else {} for each in how
        )
        if segment is None or any(self._is_fixed(node) for node in model.graph):
            self._long = {}

    def of(self, value: ir.Value | None) -> tuple[Size | None, ...]:
        """The sizes of a value: a text is an open one, None is not known; empty where nothing is."""
        if value is not None and value.const_value is not None:
            return tuple(value.const_value.shape.numpy())
        one, two = (found.get(value, Measured()) for found in (self._short, self._other))
        told = zip(one.sizes, two.sizes, strict=False)
        return tuple(
            a if a == b else one.symbols[a] if a in one.symbols and one.symbols[a] == two.symbols.get(b or 0) else None
            for a, b in told
        )

    def dtype(self, value: ir.Value | None) -> ir.DataType:
        """The type of a value's numbers; float32 where it is not known."""
        return self._short.get(value, Measured()).dtype or ir.DataType.FLOAT

    def constant(self, value: ir.Value | None) -> NDArray[Any] | None:
        """A value that is always the same but for its sizes, as it is with some sizes; None where it is not."""
        if value is not None and value.const_value is not None:
            return value.const_value.numpy()
        return self._short.get(value, Measured()).constant

    def follows(self, value: ir.Value | None, axis: int) -> bool | None:
        """Whether an axis becomes longer where the segment does; None where that cannot be told."""
        one, two = ((*found.get(value, Measured()).sizes, *[None] * 9)[axis] for found in (self._short, self._long))
        return None if one is None or two is None else one != two

    def less(self, value: ir.Value, cut: ir.Value) -> list[int | None]:
        """By how much each axis of another value is shorter, None where that depends on the sizes; empty where nothing
        is known.
        """
        found = [
            [a - b for a, b in zip(each[value].sizes, each[cut].sizes, strict=False) if a is not None and b is not None]
            for each in (self._short, self._other)
            if value in each and cut in each
        ]
        return [one if one == two else None for one, two in zip(*found, strict=True)] if len(found) == 2 else []

    def _is_fixed(self, node: ir.Node) -> bool:
        """Whether a Reshape, or a Slice from the front, makes what is longer as long as before: then the graph's
        constants are true of one length alone.
        """
        if node.op_type != "Reshape" and (node.op_type != "Slice" or whole_numbers(node.inputs[1]) != [0]):
            return False
        (given, longer), (made, same) = (
            [found.get(end, Measured()).sizes for found in (self._short, self._long)]
            for end in (node.inputs[0], node.outputs[0])
        )
        return given != longer and made == same and bool(made) and None not in made


def whole_numbers(value: ir.Value | None) -> list[int] | None:
    """The numbers of a constant; None for what is none."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else [int(number) for number in tensor.numpy().ravel()]


def measure(
    model: ir.Model, segment: Mapping[str, int], fold: Fold, values: Iterable[ir.Value], times: int, attempt: int
) -> dict[ir.Value | None, Measured]:
    """What is known of values of the outer graph, for so many times the positions; open sizes have the numbers of an
    attempt. Nothing where the graph does not go together with these.

    Raises:
        EndedError: the helper died of the graph.
    """
    copy = model.clone()
    symbols = _give_sizes(copy.graph, segment, times, attempt)
    twins = dict[ir.Value, ir.Value](zip(model.graph.inputs, copy.graph.inputs, strict=True))
    for node, twin in zip(model.graph, copy.graph, strict=True):
        twins |= zip(node.outputs, twin.outputs, strict=True)
    asked = {value: twins[value] for value in values if value in twins}
    for tensor in list(copy.graph.initializers.values()):
        if tensor.const_value is not None and tensor.const_value.size > _SMALL:
            tensor.type, tensor.shape = ir.TensorType(tensor.const_value.dtype), tensor.const_value.shape
            del copy.graph.initializers[str(tensor.name)]
            tensor.const_value = None
            copy.graph.inputs.append(tensor)
    copy.graph.outputs.clear()
    # ONNX Runtime notes what it has inferred of a graph that it changes alone: a constant's copy always goes.
    for at, end in enumerate([*asked.values(), initializer(copy.graph, "measured.is.0", np.int64(0))]):
        shown = ir.node("Identity", [end])
        shown.outputs[0].name = f"measured.{at}"
        copy.graph.append(shown)
        copy.graph.outputs.append(shown.outputs[0])
    try:
        found = fold(copy).graph.outputs if asked else []
    except RunError:  # the sizes do not go together
        return {}
    return {
        value: Measured(
            tuple(size if isinstance(size, int) else None for size in end.shape or ()),
            end.dtype,
            None if end.const_value is None else end.const_value.numpy(),
            symbols,
        )
        for value, end in zip(asked, found, strict=False)
    }


def _give_sizes(graph: ir.Graph, segment: Mapping[str, int], times: int, attempt: int) -> dict[int, Size]:
    """Make the sizes of inputs numbers, in place.

    Returns:
        The symbols that numbers stand for.
    """
    shapes = {str(value.name): value.shape for value in graph.inputs if value.shape is not None}
    places: dict[tuple[str, int], Size] = {
        (name, axis): size if isinstance(size, int) else size.value or f"input {name} axis {axis}"  # as `reading` says
        for name, shape in shapes.items()
        for axis, size in enumerate(shape)
    }
    positions = {places[place] for place in segment.items() if place in places}
    others = (size for size in dict.fromkeys(places.values()) if isinstance(size, str) and size not in positions)
    numbers: dict[Size, int] = dict(zip(others, _PRIMES[attempt:], strict=False))
    for size in [size for size in numbers if isinstance(size, str) and "+" in size]:  # "past + 1"
        parts = [part.strip() for part in size.split("+")]
        if all(part.isdecimal() or part in numbers for part in parts):
            numbers[size] = sum(int(part) if part.isdecimal() else numbers[part] for part in parts)
    numbered = dict[str, list[int]]()
    for (name, axis), size in places.items():
        plain = size if isinstance(size, int) else numbers.get(size, _POSITIONS[attempt])
        along = segment.get(name) == axis or (isinstance(size, str) and size in positions)
        numbered.setdefault(name, []).append(plain * times if along else plain)
    for value in graph.inputs:
        if value.name in numbered:
            value.shape = ir.Shape(numbered[value.name])
    for value in (output for node in graph.all_nodes() for output in node.outputs):
        value.shape = None
    return {number: size for size, number in numbers.items()}
