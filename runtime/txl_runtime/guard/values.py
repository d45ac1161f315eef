"""What is known of the values of a graph: sizes, bounds, and the numbers of small ones; and the table of rules.

A rule says of an operator what it returns, from what goes in (`plain_sizes`, `module_sizes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from txl_runtime.guard.protobuf import RefusedError

SMALL = 256
"""Numbers of a value up to which its content is kept."""
FAR = 2**62
ITEMS = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 16: 2}
"""Bytes of one number of each type that a tensor may have, by ONNX's numbers."""
SLOW = 32
"""Products in a sum that take as long as the slowest function of one number."""
Dims: TypeAlias = tuple[int, ...]
Ranges: TypeAlias = tuple[tuple[int, int], ...]


class Value(NamedTuple):
    """What is known of a value.

    Attributes:
        dims: its sizes.
        exact: whether it has these sizes, or at most these.
        most: how many numbers it can have.
        content: ranges of its numbers, where they are known.
        fixed: whether it is always the same, so that an engine may compute it when it opens the graph.
        loose: whether it can have more axes than these, though no numbers then.
        scales: the numbers of a small constant that are no whole ones, by which sizes can be multiplied.
        item: bytes of one number; of what a node returns at least 4, because engines compute in no fewer.
    """

    dims: Dims
    exact: bool
    most: int
    content: Ranges | None = None
    fixed: bool = False
    loose: bool = False
    scales: tuple[float, ...] = ()
    item: int = 4


def sized(dims: Sequence[int], exact: bool = True, content: Ranges | None = None, most: int = FAR) -> Value:
    """A value of some sizes."""
    if min(dims, default=0) < 0:
        raise RefusedError(f"a size of {min(dims)}", "0 or more")
    if len(dims) > 16:
        raise RefusedError(f"a value of {len(dims)} axes", "at most 16")
    if math.prod(n or 1 for n in dims) > 2**48:  # a 0 among them does not help who computes the product of the others
        raise RefusedError(f"a value of {ascii(list(dims))[:60]}", "fewer numbers")
    return Value(tuple(dims), exact, min(most, math.prod(dims)), content)


class Node:
    """An operator with what is known of its inputs; a rule says what it returns.

    It sets `work` and `memory`, products to sum and numbers that an engine keeps, beside what goes in and out.
    """

    def __init__(self, op: str, inputs: Sequence[Value | None], attributes: dict[str, Any], results: int) -> None:
        self.op, self.inputs, self.attributes, self.results, self.work = op, inputs, attributes, results, 0
        self.memory, self.loose = 0, any(value is not None and value.loose for value in inputs)
        self.exact = all(value is None or value.exact for value in inputs)

    def value(self, index: int) -> Value:
        """An input that has to be there."""
        found = self.inputs[index] if index < len(self.inputs) else None
        if found is None:
            raise RefusedError(f"no input {index}", "one")
        return found

    def content(self, index: int) -> Ranges | None:
        """The numbers of an input that may be missing; they have to be known."""
        if index >= len(self.inputs) or self.inputs[index] is None:
            return None
        found = self.value(index).content
        if found is None:
            raise RefusedError("a size that is computed from data", "one that follows from constants and sizes")
        return found

    def numbers(self, index: int) -> list[int] | None:
        """As `content`, of numbers that do not depend on open sizes, such as axes."""
        found = self.content(index)
        if found is not None and any(low != high for low, high in found):
            raise RefusedError("axes that depend on a size", "constants")
        return None if found is None else [low for low, _ in found]

    def axis(self, rank: int, default: int = 0, index: int | None = None) -> int:
        """The attribute "axis", or another one, counted from the front."""
        return place(int(self.attributes.get("axis", default)) if index is None else index, rank)

    def like(self, dims: Sequence[int], content: Ranges | None = None, exact: bool = True, most: int = FAR) -> Value:
        """A result."""
        return sized(dims, self.exact and exact, content, most)


def place(axis: int, rank: int) -> int:
    """An axis counted from the front."""
    if not -rank <= axis < max(rank, 1):
        raise RefusedError(f"axis {axis} of a value with {rank}", "one that it has")
    return axis % rank if rank else 0


def wider(*shapes: Dims) -> Dims:
    """What shapes are broadcast to, at most."""
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return first
    rank = max(map(len, shapes))
    columns = zip(*((1,) * (rank - len(shape)) + shape for shape in shapes), strict=True)
    return tuple(0 if 0 in sizes and max(sizes) <= 1 else max(sizes) for sizes in columns)


def sizes_in(node: Node, index: int) -> tuple[list[int], bool]:
    """Sizes that are the content of an input, at most, and whether they are exact."""
    content = node.content(index) or ()
    return [high for _, high in content], all(low == high for low, high in content)


Rule: TypeAlias = "Callable[[Node], Value | list[Value]]"
RULES: dict[str, Rule] = {}
"""What a node returns, by the rule's name: one value for all of its results, or one for each."""


def rule(function: Rule) -> Rule:
    """Enter a rule under its name."""
    RULES[function.__name__[1:]] = function
    return function
