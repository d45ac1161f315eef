"""Reads and writes at indices, in forms that PyTorch's ONNX exporter can write down.

In `cache[torch.arange(B), n % 6] = x`, n may be int32, arange is int64. ONNX joins no two types, so n becomes int64.
How many places `score[score == 0] = 1.0` writes to depends on values. `torch.where` chooses in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_arg


def plain_indices(exported: Any) -> Any:
    """What `torch.export` made, with such reads and writes in other forms; the same object where it has none."""
    found = any(_has_other_form(node) for node in exported.graph.nodes)
    return exported.run_decompositions(dict(_FORMS)) if found else exported


def _has_other_form(node: Any) -> bool:
    """Tried on sizes and types alone, which torch notes beside every operator."""
    form = _write if node.target is aten.index_put_.default else _FORMS.get(node.target)
    if form is None:
        return False
    given, named = map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    return form(*given, **named) is not NotImplemented


def _read(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    return aten.index(x, _wide(indices)) if any(map(_is_int32, indices)) else NotImplemented


def _write(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    found = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(found) == 1 and found[0][1].dtype == torch.bool:
        return _choice(x, *found[0], values, accumulate)
    return aten.index_put(x, _wide(indices), values, accumulate) if any(map(_is_int32, indices)) else NotImplemented


def _is_int32(index: Tensor | None) -> bool:
    return index is not None and index.dtype == torch.int32


def _wide(indices: Sequence[Any]) -> list[Any]:
    return [index.long() if _is_int32(index) else index for index in indices]


def _choice(x: Tensor, axis: int, mask: Tensor, values: Tensor, accumulate: bool) -> Any:
    """`x[:, mask] = values`, the mask's first axis being `axis`; as it is where each chosen place has its own value."""
    behind = x.ndim - axis - mask.ndim
    sizes = (*(1,) * (axis + 1 + behind - values.ndim), *values.shape)
    if not isinstance(sizes[axis], int) or sizes[axis] != 1:
        return NotImplemented
    values = values.reshape(*sizes[:axis], *(1,) * mask.ndim, *sizes[axis + 1 :])
    return torch.where(mask[(..., *(None,) * behind)], x + values if accumulate else values, x)


aten = torch.ops.aten
_FORMS: Mapping[Any, Callable[..., Any]] = {aten.index.Tensor: _read, aten.index_put.default: _write}
