"""Reads and writes at indices, in forms that PyTorch's ONNX exporter can write down.

    cache[torch.arange(B), n % 6] = x       n is int32, arange is int64; ONNX joins no two types, so n becomes int64
    score[score == 0] = float("-inf")       how many places this chooses depends on values; torch.where chooses in all
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
    """Tried on the sizes and types alone that torch notes beside every operator."""
    form = _FORMS.get(_IN_PLACE.get(node.target, node.target))
    if form is None:
        return False
    given, named = map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    return form(*given, **named) is not NotImplemented


def _read(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    wide = _wide(indices)
    return NotImplemented if wide is None else aten.index(x, wide)


def _write(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    found = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(found) == 1 and found[0][1].dtype == torch.bool:
        return _choice(x, *found[0], values, accumulate)
    wide = _wide(indices)
    return NotImplemented if wide is None else aten.index_put(x, wide, values, accumulate)


def _wide(indices: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    """Indices in int64; None where no index is int32."""
    if not any(index is not None and index.dtype == torch.int32 for index in indices):
        return None
    return [index.long() if index is not None and index.dtype == torch.int32 else index for index in indices]


def _choice(x: Tensor, axis: int, mask: Tensor, values: Tensor, accumulate: bool) -> Any:
    """`x[:, mask] = values`, the mask's first axis being `axis`; as it is where each chosen place has its own value."""
    behind = x.ndim - axis - mask.ndim
    sizes = (*(1,) * (axis + 1 + behind - values.ndim), *values.shape)
    if not isinstance(sizes[axis], int) or sizes[axis] != 1:
        return NotImplemented
    values = values.reshape(*sizes[:axis], *(1,) * mask.ndim, *sizes[axis + 1 :])
    return torch.where(mask[(..., *(None,) * behind)], x + values if accumulate else values, x)


def _add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Any:
    wide = _wide([index])
    return NotImplemented if wide is None else aten.index_add(x, dim, wide[0], source, alpha=alpha)


aten = torch.ops.aten
_FORMS: Mapping[Any, Callable[..., Any]] = {
    aten.index.Tensor: _read,
    aten.index_put.default: _write,
    aten.index_add.default: _add,
}
_IN_PLACE: Mapping[Any, Any] = {
    aten.index_put_.default: aten.index_put.default,
    aten.index_add_.default: aten.index_add.default,
}
