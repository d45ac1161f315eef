"""Rewrites functions whose plain formula overflows or loses digits.

PyTorch computes log(exp(a) + exp(b)) without exp(a). Its ONNX exporter writes the plain formula, which is infinite when
exp exceeds float32. So the operators of `FORMS` are decomposed here, before the exporter sees them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def stable(exported: Any) -> Any:
    """Return an exported program with the operators of `FORMS` decomposed; the same object if it has none of them."""
    present = any(node.target in FORMS for node in exported.graph.nodes)
    return exported.run_decompositions(dict(FORMS)) if present else exported


def _log1p(x: Tensor) -> Tensor:
    """Compute log(1 + x), corrected by the factor that rounding of 1 + x lost."""
    more = x + 1.0
    left = more - 1
    factor = torch.where(left == x, 1, x / left)  # infinity / infinity would be NaN
    return torch.where(left == 0, x, more.log() * factor)


def _expm1(x: Tensor) -> Tensor:
    """Compute exp(x) - 1 as tanh(x / 2) (exp(x) + 1), without a subtraction."""
    return torch.tanh(x / 2) * (x.exp() + 1)


def _logaddexp(one: Tensor, other: Tensor) -> Tensor:
    apart = torch.where(one == other, 0, one - other)  # infinity - infinity would be NaN
    return torch.maximum(one, other) + _log1p((-apart.abs()).exp())


def _logcumsumexp(x: Tensor, dim: int) -> Any:
    """Combine 1, 2, 4, … values in turn, each from two earlier results; return NotImplemented if the size is open."""
    size, reach = x.shape[dim] if x.ndim else 1, 1
    if not isinstance(size, int):
        return NotImplemented
    while reach < size:
        later, earlier = x.narrow(dim, reach, size - reach), x.narrow(dim, 0, size - reach)
        x = torch.cat([x.narrow(dim, 0, reach), _logaddexp(later, earlier)], dim)
        reach *= 2
    return x.clone()


def _atan2(y: Tensor, x: Tensor) -> Tensor:
    """Compute the angle in the first octant, then move it to the point's octant."""
    kind = (y / x).dtype
    y, x = y.to(kind), x.to(kind)
    height, width = y.abs(), x.abs()
    steep = height > width
    less, more = torch.where(steep, width, height), torch.where(steep, height, width)
    angle = torch.where(less == more, more.sign(), less / more).atan()  # two zeros, or two infinities, are equal, too
    angle = torch.where(steep, math.pi / 2 - angle, angle)
    angle = torch.where(_negative(x), math.pi - angle, angle)
    return angle * torch.where(_negative(y), -1, 1)  # where(…, -angle, angle) would return 0 for -0


def _negative(x: Tensor) -> Tensor:
    """Return True where a number's sign is negative, including -0: [True, True, False] for [-2, -0.0, 0.0]."""
    return (x < 0) | (x.reciprocal() < 0)


aten = torch.ops.aten
FORMS: Mapping[Any, Callable[..., Any]] = {
    aten.log1p.default: _log1p,
    aten.expm1.default: _expm1,
    aten.special_expm1.default: _expm1,
    aten.log_sigmoid.default: lambda x: x.clamp(max=0) - _log1p((-x.abs()).exp()),
    aten.logaddexp.default: _logaddexp,
    aten.logaddexp2.default: lambda one, other: _logaddexp(one * math.log(2), other * math.log(2)) / math.log(2),
    aten.logcumsumexp.default: _logcumsumexp,
    aten.atan2.default: _atan2,
}
"""PyTorch's operators, each with its replacement."""
