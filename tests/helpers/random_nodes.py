"""Single nodes with random inputs, sizes and attributes, which mostly fit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Made = tuple[list[str], dict[str, Any], int]
"""Inputs, attributes, and how many results."""


class Case:
    """A graph of one node, and of what its inputs need."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.most: dict[str, tuple[int, ...]] = {}
        self.feeds: dict[str, np.ndarray[Any, Any]] = {}
        self.inputs, self.constants, self.nodes = list[Any](), list[Any](), list[Any]()

    def number(self, low: int, high: int) -> int:
        return self.draw.randint(low, high)

    def pick(self, *choices: Any) -> Any:
        return self.draw.choice(choices)

    def shape(self, low: int = 1, high: int = 4) -> list[int]:
        return [self.number(self.pick(0, *[1] * 15), 5) for _ in range(self.number(low, high))]

    def constant(self, numbers: Any, dtype: Any = np.int64) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(numbers, dtype), name))
        return name

    def value(self, shape: Sequence[int]) -> str:
        """An input, some of whose sizes may be open."""
        name, opened = f"x{len(self.inputs)}", self.draw.random() < 0.3
        dims = [f"{name}.{i}" if opened and self.draw.random() < 0.6 else n for i, n in enumerate(shape)]
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, dims))
        self.most[name] = tuple(n + 2 * isinstance(dim, str) for n, dim in zip(shape, dims, strict=True))
        self.feeds[name] = np.array(self.draw.choices(range(4), k=int(np.prod(shape))), np.float32).reshape(shape)
        return name

    def add(self, operator: str, made: Made, prefix: str = "y") -> list[str]:
        """A node; the names of its results."""
        inputs, attributes, many = made
        results = [f"{prefix}{i}" for i in range(many)]
        node = helper.make_node(operator, inputs, results)
        for name, given in attributes.items():  # of an empty list the package cannot tell the type
            kind = onnx.AttributeProto.INTS if given == [] else None
            node.attribute.append(helper.make_attribute(name, given, attr_type=kind))
        self.nodes.append(node)
        return results

    def model(self) -> onnx.ModelProto:
        """The graph, without outputs."""
        graph = helper.make_graph(self.nodes, "one", self.inputs, [], self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.number(18, 22))], ir_version=10)

    def sizes(self, numbers: Sequence[int]) -> str:
        """Whole numbers: constants, or sizes of inputs."""
        if not numbers or self.draw.random() < 0.6:
            return self.constant(np.array(numbers, np.int64))
        names = [f"s{len(self.nodes)}.{i}" for i in range(len(numbers))]
        for name, number in zip(names, numbers, strict=True):
            if 0 <= number < 10 and self.number(0, 1):
                self.nodes.append(helper.make_node("Shape", [self.value([number])], [name]))
            else:
                self.nodes.append(helper.make_node("Constant", [], [name], value_ints=[number]))
        self.nodes.append(helper.make_node("Concat", names, [f"{names[0]}.all"], axis=0))
        return f"{names[0]}.all"


def whole_pair(case: Case) -> Made:
    """Sizes that are computed, and held against what comes out."""
    shape = case.shape(1, 1)
    return [case.sizes([case.number(0, 9) for _ in shape]), case.constant([case.number(-3, 4)])], {}, 1


def normalized(case: Case) -> Made:
    shape = case.shape()
    axis = case.number(0, len(shape) - 1)
    return [case.value(shape), case.constant(np.ones(shape[axis:]), np.float32)], {"axis": axis}, case.number(1, 3)


def reduced(case: Case) -> Made:
    shape = case.shape(0)
    axes = case.pick(None, [], [case.number(-len(shape), len(shape) - 1)] if shape else [], list(range(len(shape))))
    given = {name: case.number(0, 1) for name in ("keepdims", "noop_with_empty_axes") if case.number(0, 1)}
    return [case.value(shape), *([] if axes is None else [case.constant(np.array(axes, np.int64))])], given, 1


def windows(case: Case, many: int) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, low, high, count in (("strides", 1, 3, many), ("dilations", 1, 3, many), ("pads", 0, 2, 2 * many)):
        if case.number(0, 1):
            given[name] = [case.number(low, high) for _ in range(count)]
    if "pads" not in given and case.number(0, 1):
        given["auto_pad"] = case.pick("SAME_UPPER", "SAME_LOWER", "VALID")
    return given


def pooled(case: Case) -> Made:
    many = case.number(1, 2)
    kernel = [case.number(1, 4) for _ in range(many)]
    given = {"kernel_shape": kernel, "ceil_mode": case.number(0, 1), **windows(case, many)}
    return [case.value([1, 2, *(case.number(1, 9) for _ in kernel)])], given, 1


def convolved(case: Case, turned: bool = False) -> Made:
    many, group, width = case.number(1, 2), case.number(1, 2), case.number(1, 2)
    weights = [2 * group, case.number(1, 2) if turned else width, *(case.number(1, 3) for _ in range(many))]
    given = {"group": group, **windows(case, many)}
    if turned and case.number(0, 1):
        given["output_padding"] = [case.number(0, 2) for _ in range(many)]
    x = [case.number(1, 2), 2 * group if turned else group * width, *(case.number(1, 9) for _ in range(many))]
    return [case.value(x), case.constant(np.ones(weights), np.float32)], given, 1


def sliced(case: Case) -> Made:
    shape = case.shape(1, 3)
    axes = case.draw.sample(range(-len(shape), 0), case.number(1, len(shape)))
    far = [-(2**63), -(2**31), 2**31 - 1, 2**63 - 1, 100, -100]
    ends = [[case.pick(*far) if case.draw.random() < 0.2 else case.number(-6, 6) for _ in axes] for _ in range(2)]
    steps = [case.pick(-3, -2, -1, 1, 2, 3, *far[1:4:2]) for _ in axes]
    given = [case.pick(case.sizes, case.constant)(end) for end in ends]
    return [case.value(shape), *given, case.constant(axes), case.constant(steps)], {}, 1


def reshaped(case: Case) -> Made:
    shape = case.shape(0)
    rest, sizes = int(np.prod(shape)), list[int]()
    for _ in range(case.number(0, 3)):
        sizes.append(case.pick(*(n for n in range(1, rest + 1) if rest % n == 0)) if rest else case.number(0, 2))
        rest //= sizes[-1] or 1
    sizes.append(rest)
    if case.number(0, 1):
        sizes[case.number(0, len(sizes) - 1)] = -1
    sizes = [0 if i < len(shape) and n == shape[i] and case.number(0, 1) else n for i, n in enumerate(sizes)]
    return [case.value(shape), case.sizes(sizes)], {"allowzero": case.number(0, 3) // 3}, 1


def single(operator: str, seed: int) -> Case:
    """A graph of one node of an operator, one of `MADE`."""
    case = Case(seed)
    case.add(operator, MADE[operator](case))
    return case


MADE: dict[str, Callable[[Case], Made]] = {
    **dict.fromkeys(("Div", "Mod", "Sub", "Mul", "Min"), whole_pair),
    **dict.fromkeys(("ReduceSum", "ReduceMax", "ReduceMean", "ReduceL2", "ReduceProd"), reduced),
    **dict.fromkeys(("AveragePool", "MaxPool"), pooled),
    "LayerNormalization": normalized,
    "Conv": convolved,
    "ConvTranspose": lambda case: convolved(case, True),
    "ConstantOfShape": lambda case: ([case.sizes(case.shape(0))], {}, 1),
    "Expand": lambda case: ([case.value([1, *case.shape(0, 2)]), case.sizes(case.shape(1, 1))], {}, 1),
    "Reshape": reshaped,
    "Shape": lambda case: ([case.value(case.shape())], {"start": case.number(-5, 5), "end": case.number(-5, 5)}, 1),
    "Slice": sliced,
}
