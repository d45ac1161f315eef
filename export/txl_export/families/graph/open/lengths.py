"""Sizes of a graph's values, and which axes become longer where a segment does: ONNX infers them for two lengths."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from txl_export.families.graph.take.reading import Size
from txl_export.graphs.tracing import quiet

_POSITIONS = (2**14, 3 * 2**14)
"""Positions of a segment whose length is open, in two attempts: more than any kernel has."""
_PRIMES = (10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079, 10091, 10093, 10099)
"""Numbers that stand for other open sizes, by which these are recognised; in the second attempt each for the next."""


class Sizes:
    """Sizes of a graph as it was when this was made.

    Args:
        model: the graph; it stays as it is.
        segment: by name of an input, its axis of positions; empty where no axis is one, None where that is not known.
    """

    def __init__(self, model: ir.Model, segment: Mapping[str, int] | None) -> None:
        self._short, again, self._long = (_inferred(model, segment or {}, *how) for how in ((1, 0), (1, 1), (2, 0)))
        self._known = {
            value: tuple(one if one == two else None for one, two in zip(sizes, again[value], strict=False))
            for value, sizes in self._short.items()
        }
        if segment is None or any(self._is_fixed(node) for node in model.graph.all_nodes()):
            self._long = {}

    def of(self, value: ir.Value | None) -> tuple[Size | None, ...]:
        """The sizes of a value: a text is an open one, None is not known; empty where nothing is."""
        if value is None or value.const_value is None:
            return self._known.get(value, ())
        return tuple(value.const_value.shape.numpy())

    def follows(self, value: ir.Value | None, axis: int) -> bool | None:
        """Whether an axis becomes longer where the segment does; None where that cannot be told."""
        one, two = ((*sizes.get(value, ()), *[None] * 9)[axis] for sizes in (self._short, self._long))
        return None if one is None or two is None else one != two

    def _is_fixed(self, node: ir.Node) -> bool:
        """Whether a Reshape, or a Slice from the front, makes what is longer as long as before: then the graph's
        constants are true of one length alone.
        """
        if node.op_type != "Reshape" and (node.op_type != "Slice" or whole_numbers(node.inputs[1]) != [0]):
            return False
        (given, longer), (made, same) = (
            (self._short.get(end), self._long.get(end)) for end in (node.inputs[0], node.outputs[0])
        )
        return given != longer and made == same and bool(made) and None not in (made or ())


def whole_numbers(value: ir.Value | None) -> list[int] | None:
    """The numbers of a constant; None for what is none."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else [int(number) for number in tensor.numpy().ravel()]


def _inferred(
    model: ir.Model, segment: Mapping[str, int], times: int, attempt: int
) -> dict[ir.Value | None, tuple[Size | None, ...]]:
    """Sizes by value, for so many times the positions; those that are open have the numbers of an attempt."""
    copy = model.clone()
    shapes = {str(value.name): value.shape for value in copy.graph.inputs if value.shape is not None}
    places: dict[tuple[str, int], Size] = {
        (name, axis): size if isinstance(size, int) else size.value or f"input {name} axis {axis}"  # as `reading` says
        for name, shape in shapes.items()
        for axis, size in enumerate(shape)
    }
    positions = {places[place] for place in segment.items()}
    others = (size for size in dict.fromkeys(places.values()) if isinstance(size, str) and size not in positions)
    numbers: dict[Size, int] = dict(zip(others, _PRIMES[attempt:], strict=False))
    symbols = {number: size for size, number in numbers.items()}
    for (name, axis), size in places.items():
        plain = size if isinstance(size, int) else numbers.get(size, _POSITIONS[attempt])
        shapes[name][axis] = plain * times if segment.get(name) == axis or size in positions - {plain} else plain
    pairs = list(zip(model.graph.inputs, copy.graph.inputs, strict=True))
    for node, twin in zip(model.graph.all_nodes(), copy.graph.all_nodes(), strict=True):
        pairs += zip(node.outputs, twin.outputs, strict=True)
        for output in twin.outputs:
            output.shape = None
    with quiet():
        for values in (False, True):  # as in `settling`: with values ONNX may stumble, and then it changes nothing
            ShapeInferencePass(check_type=False, strict_mode=False, data_prop=values)(copy)

    return {
        value: tuple(symbols.get(size, size) if isinstance(size, int) else None for size in twin.shape or ())
        for value, twin in pairs
    }
