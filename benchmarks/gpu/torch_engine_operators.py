"""Compute with PyTorch the ONNX operators that composed programs have.

Each function takes a node and the node's input tensors, and returns one result or several. No function reads a value of
a tensor on the device, so that the work can be recorded into a CUDA graph: shapes, axes and sizes are constants of the
graph, which are read on the host when a program is opened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["OPERATORS", "STATIC", "TYPES", "Node"]

TYPES = {
    1: torch.float32,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    16: torch.bfloat16,
}
"""PyTorch's dtypes by the numbers that ONNX gives to types."""

STATIC: dict[str, tuple[int, ...]] = {
    "Reshape": (1,),
    "Expand": (1,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Unsqueeze": (1,),
    "Squeeze": (1,),
    "CumSum": (1,),
    "TopK": (1,),
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceLogSumExp"), (1,)),
}
"""For each operator the numbers of its inputs that are shapes, axes or sizes, which are read when a program is opened.
"""


@dataclass(frozen=True)
class Node:
    """One node of a graph.

    Attributes:
        operator, name: the node's operator, and the node's name in messages.
        attributes: the node's attributes by name.
        static: the whole numbers of each input in `STATIC`, by the input's number.
        results: the number of the node's results.
        in_place: True if the first input's tensor is overwritten with the result.
    """

    operator: str
    name: str
    attributes: Mapping[str, Any]
    static: Mapping[int, tuple[int, ...]]
    results: int
    in_place: bool

    def refuse(self, what: str) -> NotImplementedError:
        """Return an error that says that this use of the operator, `what`, is not interpreted."""
        return NotImplementedError(f"{self.operator} {self.name}: {what} is not interpreted")


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda _, first, second: function(first, second)


def _unary(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda _, given: function(given)


def _every(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return an operator of any number of tensors, which applies a function of two tensors one by one."""

    def run(_: Node, first: Tensor, *others: Tensor) -> Tensor:
        for other in others:
            first = function(first, other)
        return first

    return run


def _divide(_: Node, first: Tensor, second: Tensor) -> Tensor:
    whole = not first.is_floating_point()
    return torch.div(first, second, rounding_mode="trunc") if whole else first / second


def _clip(_: Node, tensor: Tensor, least: Tensor | None = None, most: Tensor | None = None) -> Tensor:
    tensor = tensor if least is None else torch.maximum(tensor, least)
    return tensor if most is None else torch.minimum(tensor, most)


def _cast(node: Node, tensor: Tensor) -> Tensor:
    kind = int(node.attributes["to"])
    if kind not in TYPES:
        raise node.refuse(f"a cast to ONNX's type {kind}")
    return tensor.to(TYPES[kind])


def _gather(node: Node, tensor: Tensor, index: Tensor) -> Tensor:
    axis = int(node.attributes.get("axis", 0)) % tensor.dim()
    flat = _within(index, tensor.shape[axis]).flatten()
    return tensor.index_select(axis, flat).reshape(*tensor.shape[:axis], *index.shape, *tensor.shape[axis + 1 :])


def _gather_elements(node: Node, tensor: Tensor, index: Tensor) -> Tensor:
    axis = int(node.attributes.get("axis", 0)) % tensor.dim()
    return tensor.gather(axis, _within(index, tensor.shape[axis]))


def _within(index: Tensor, size: int) -> Tensor:
    """Return indices of an axis without negative ones, which ONNX counts from the axis's end: -1 becomes `size` - 1."""
    index = index.long()
    return torch.where(index < 0, index + size, index)


def _scatter(node: Node, held: Tensor, rows: Tensor, starts: Tensor | None = None) -> Tensor:
    """Write rows into a tensor along an axis, in each sequence from its own start in `starts` on."""
    if node.attributes.get("mode", b"linear") != b"linear":
        raise node.refuse("a mode other than linear")
    axis = int(node.attributes.get("axis", -2)) % held.dim()
    places = torch.arange(rows.shape[axis], device=held.device)
    sizes = [1] * held.dim()
    sizes[axis] = -1
    index = places.reshape(sizes)
    if starts is not None:
        index = index + starts.long().reshape([-1, *[1] * (held.dim() - 1)])
    index = index.expand(rows.shape)
    return held.scatter_(axis, index, rows) if node.in_place else held.scatter(axis, index, rows)


def _product(first: Tensor, second: Tensor) -> Tensor:
    """Multiply matrices; on a CPU, half precision is summed in float32 and rounded once, as a GPU does."""
    if first.device.type == "cpu" and first.dtype in (torch.float16, torch.bfloat16):
        return (first.float() @ second.float()).to(first.dtype)
    return first @ second


def _gemm(node: Node, first: Tensor, second: Tensor, bias: Tensor | None = None) -> Tensor:
    left = first.T if node.attributes.get("transA", 0) else first
    right = second.T if node.attributes.get("transB", 0) else second
    product = _product(left, right)
    alpha, beta = node.attributes.get("alpha", 1.0), node.attributes.get("beta", 1.0)
    product = product if alpha == 1 else product * alpha
    return product if bias is None else product + (bias if beta == 1 else bias * beta)


def _layer_norm(node: Node, tensor: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    axis = int(node.attributes.get("axis", -1)) % tensor.dim()
    epsilon = float(node.attributes.get("epsilon", 1e-5))
    return torch.nn.functional.layer_norm(tensor, list(tensor.shape[axis:]), scale, bias, epsilon)


def _softmax(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda node, given: function(given, dim=int(node.attributes.get("axis", -1)))


def _reshape(node: Node, tensor: Tensor, _: Tensor) -> Tensor:
    zero = not node.attributes.get("allowzero", 0)
    sizes = [tensor.shape[i] if size == 0 and zero else size for i, size in enumerate(node.static[1])]
    return tensor.reshape(sizes)


def _expand(node: Node, tensor: Tensor, _: Tensor) -> Tensor:
    sizes = list(node.static[1])
    missing = tensor.dim() - len(sizes)
    sizes = list(tensor.shape[: max(missing, 0)]) + sizes
    for place in range(1, tensor.dim() + 1):  # from the right: a size of 1 takes the other's size
        sizes[-place] = max(sizes[-place], tensor.shape[-place])
    return tensor.expand(sizes)


def _slice(node: Node, tensor: Tensor, *_: Tensor) -> Tensor:
    starts, ends = node.static[1], node.static[2]
    axes, steps = node.static.get(3, tuple(range(len(starts)))), node.static.get(4, (1,) * len(starts))
    if min(steps) < 1:
        raise node.refuse("a step backwards")
    places: list[slice] = [slice(None)] * tensor.dim()
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        places[axis] = slice(start, end, step)
    return tensor[tuple(places)]


def _split(node: Node, tensor: Tensor, *_: Tensor) -> Sequence[Tensor]:
    axis = int(node.attributes.get("axis", 0))
    whole = tensor.shape[axis]
    even = math.ceil(whole / node.results)
    sizes = node.static.get(1) or [min(even, whole - start) for start in range(0, whole, even)]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [tensor.narrow(axis, start, size) for start, size in zip(starts, sizes, strict=True)]


def _unsqueeze(node: Node, tensor: Tensor, _: Tensor) -> Tensor:
    rank = tensor.dim() + len(node.static[1])
    for axis in sorted(place % rank for place in node.static[1]):
        tensor = tensor.unsqueeze(axis)
    return tensor


def _squeeze(node: Node, tensor: Tensor, *_: Tensor) -> Tensor:
    return tensor.squeeze(node.static[1]) if 1 in node.static else tensor.squeeze()


def _reduce(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(node: Node, given: Tensor, *_: Tensor) -> Tensor:
        axes = tuple(node.static.get(1, node.attributes.get("axes", ())))
        if not axes and node.attributes.get("noop_with_empty_axes", 0):
            return given
        return function(given, dim=axes or tuple(range(given.dim())), keepdim=bool(node.attributes.get("keepdims", 1)))

    return run


def _cumulative(node: Node, tensor: Tensor, _: Tensor) -> Tensor:
    if node.attributes.get("exclusive", 0) or node.attributes.get("reverse", 0):
        raise node.refuse("an exclusive or a reversed sum")
    return tensor.cumsum(node.static[1][0], dtype=tensor.dtype)


def _best(node: Node, tensor: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest or smallest values and their places; of equal values the first comes first, as ONNX demands.

    PyTorch's `topk` does not promise that order.
    """
    axis, count = int(node.attributes.get("axis", -1)), node.static[1][0]
    values, places = tensor.sort(dim=axis, descending=bool(node.attributes.get("largest", 1)), stable=True)
    return values.narrow(axis, 0, count), places.narrow(axis, 0, count)


def _largest_place(node: Node, tensor: Tensor) -> Tensor:
    if node.attributes.get("select_last_index", 0):
        raise node.refuse("the last of equal values")
    axis = int(node.attributes.get("axis", 0))
    return tensor.argmax(dim=axis, keepdim=bool(node.attributes.get("keepdims", 1)))


OPERATORS: dict[str, Callable[..., Tensor | Sequence[Tensor]]] = {
    "Add": _binary(torch.add),
    "And": _binary(torch.logical_and),
    "ArgMax": _largest_place,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": lambda node, *given: torch.cat(given, dim=int(node.attributes["axis"])),
    "CumSum": _cumulative,
    "Div": _divide,
    "Equal": _binary(torch.eq),
    "Exp": _unary(torch.exp),
    "Expand": _expand,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "Gemm": _gemm,
    "Greater": _binary(torch.gt),
    "GreaterOrEqual": _binary(torch.ge),
    "Identity": lambda _, given: given,
    "LayerNormalization": _layer_norm,
    "Less": _binary(torch.lt),
    "LessOrEqual": _binary(torch.le),
    "Log": _unary(torch.log),
    "LogSoftmax": _softmax(torch.log_softmax),
    "MatMul": _binary(_product),
    "Max": _every(torch.maximum),
    "Min": _every(torch.minimum),
    "Mul": _binary(torch.mul),
    "Neg": _unary(torch.neg),
    "Not": _unary(torch.logical_not),
    "Or": _binary(torch.logical_or),
    "ReduceLogSumExp": _reduce(torch.logsumexp),
    "ReduceMax": _reduce(torch.amax),
    "ReduceMean": _reduce(torch.mean),
    "ReduceSum": _reduce(torch.sum),
    "Relu": _unary(torch.relu),
    "Reshape": _reshape,
    "Sigmoid": _unary(torch.sigmoid),
    "Slice": _slice,
    "Softmax": _softmax(torch.softmax),
    "Split": _split,
    "Squeeze": _squeeze,
    "Sub": _binary(torch.sub),
    "Tanh": _unary(torch.tanh),
    "TensorScatter": _scatter,
    "TopK": _best,
    "Transpose": lambda node, given: given.permute(*node.attributes["perm"]),
    "Unsqueeze": _unsqueeze,
    "Where": lambda _, which, yes, no: torch.where(which, yes, no),
}
"""All operators that are interpreted: functions by ONNX's name of the operator."""
