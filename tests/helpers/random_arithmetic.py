"""Random graphs that compute whole numbers and sizes by one another, of any kinds and sizes, whether or not they fit.

They are for two readers of graphs that have to say the same: few of them are what an engine would run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from random_nodes import Case, Made

FAR = (100, 2**31 - 1, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63))
PAIRS = ("Add", "Sub", "Mul", "Div", "Min", "Max", "Mod")
ALONE = ("Neg", "Abs", "Identity", "Sign", "Size", "NonZero", "Shape")
OTHERS = (
    *("Transpose", "Cast", "Concat", "Gather", "GatherElements", "GatherND", "Slice", "Split", "Squeeze", "Unsqueeze"),
    *("Reshape", "Expand", "Tile", "ConstantOfShape", "Range", "Constant", "ReduceSum", "ReduceMax", "Pad", "OneHot"),
    *("TopK", "Where", "Flatten", "PRelu"),
)


class Arithmetic(Case):
    """A graph whose nodes read inputs, constants and one another's results."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._names = [self.value(self.shape(0)) for _ in range(self.number(1, 2))]
        for _ in range(self.number(1, 6)):
            operator = self.pick(*PAIRS, *ALONE, *OTHERS)
            self._names += self.add(operator, self._made(operator), f"v{len(self.nodes)}.")

    def _any(self) -> str:
        """What there is already, mostly a late one, or a constant."""
        if self.draw.random() < 0.25:
            kind = self.pick(np.int64, np.int64, np.int32, np.float32)
            dims = self.pick([], [1], [1], [2], [3], [4], [2, 2], [0], [1, 3])
            return self.constant(np.reshape(self._numbers(int(np.prod(dims)), -3, 5, kind), dims), kind)
        return self.pick(*self._names[-4:], *self._names)

    def _said(self, low: int, high: int, count: int | None = None) -> str:
        """Whole numbers that say sizes, axes or places."""
        if self.draw.random() < 0.15:
            return self._any()
        count = self.pick(0, 1, 1, 1, 2, 2, 3) if count is None else count
        numbers = self._numbers(count, low, high, np.int64)
        return self.constant(numbers[0] if count == 1 and self.draw.random() < 0.15 else np.array(numbers, np.int64))

    def _numbers(self, count: int, low: int, high: int, kind: Any) -> list[int]:
        far = self.draw.random() < 0.15
        numbers = [self.pick(*FAR) if far and self.number(0, 1) else self.number(low, high) for _ in range(count)]
        return [max(min(number, 2**31 - 1), -(2**31)) for number in numbers] if kind == np.int32 else numbers

    def _made(self, operator: str) -> Made:
        given: dict[str, Any] = {}
        axis = {"axis": self.number(-2, 1)} if self.number(0, 1) else {}
        match operator:
            case "Transpose":
                return [self._any()], {"perm": self.draw.sample(range(3), self.number(0, 3))} if axis else {}, 1
            case "Cast":
                return [self._any()], {"to": self.pick(1, 6, 7, 7, 9, 10)}, 1
            case "Shape":
                bounds = [name for name in ("start", "end") if self.number(0, 1)]
                return [self._any()], {name: self.number(-3, 4) for name in bounds}, 1
            case "Concat":
                return [self._any() for _ in range(self.number(1, 3))], {"axis": self.pick(0, 0, 0, -1, 1)}, 1
            case "Gather" | "GatherElements":
                return [self._any(), self._said(-2, 3)], axis, 1
            case "Slice":
                count = self.pick(1, 1, 2)
                inputs = [self._any(), self._said(-4, 5, count), self._said(-4, 5, count)]
                axes, steps = self._said(-2, 1, count), self.constant(np.array([self.pick(1, 1, -1, 2, -2, 0)] * count))
                return [*inputs, *[axes, steps][: self.number(0, 2)]], {}, 1
            case "Split":
                many = self.number(1, 3)
                given = axis | ({"num_outputs": self.pick(many, 2)} if self.number(0, 1) else {})
                return [self._any(), *[self._said(0, 3, many)][: self.number(0, 1)]], given, many
            case "Squeeze" | "Unsqueeze":
                return [self._any(), *[self._said(-2, 2)][: operator == "Unsqueeze" or self.number(0, 1)]], {}, 1
            case "Reshape":
                return [self._any(), self._said(-1, 4)], {"allowzero": self.number(0, 1)} if axis else {}, 1
            case "Expand" | "Tile":
                return [self._any(), self._said(-1, 4)], {}, 1
            case "ConstantOfShape":
                value = np.array([self.number(-3, 9)], self.pick(np.int64, np.int32, np.float32))
                return [self._any()], {"value": onnx.numpy_helper.from_array(value)} if axis else {}, 1
            case "Range":
                return [self.pick(self._any, lambda: self.constant(self.number(-3, 9)))() for _ in range(3)], {}, 1
            case "Constant":
                given = {"value_int": self.number(-3, 9), "value_ints": [self.number(-1, 4)] * self.number(0, 2)}
                given |= {"value_float": 1.5, "value_floats": [1.0, 2.0]}
                return [], dict([self.pick(*given.items())]), 1
            case "ReduceSum" | "ReduceMax":
                flags = [name for name in ("keepdims", "noop_with_empty_axes") if self.number(0, 1)]
                given = {name: self.number(0, 1) for name in flags}
                return [self._any(), *[self._said(-2, 2)][: self.number(0, 1)]], given, 1
            case "Pad":
                rest = ["", self._said(-2, 2)] if self.number(0, 2) == 2 else []
                return [self._any(), self._said(-1, 3, self.pick(2, 4, 2, 0, 6)), *rest], {}, 1
            case "OneHot":
                return [self._any(), self._said(0, 6, 1), self.constant([0, 1])], axis, 1
            case "TopK":
                return [self._any(), self._said(0, 4, 1)], axis, 2
            case "Where":
                return [self._any() for _ in range(3)], {}, 1
            case "Flatten":
                return [self._any()], {"axis": self.number(-5, 5)} if axis else {}, 1
            case _:
                return [self._any() for _ in range(1 if operator in ALONE else 2)], {}, 1
