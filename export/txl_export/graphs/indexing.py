"""Rewrites reads and writes at indices into forms that PyTorch's ONNX exporter supports.

In `cache[torch.arange(B), n % 6] = x`, n may be int32 while arange is int64; ONNX cannot combine two types, so n
becomes int64. In `score[score == 0] = 1.0` the number of written places depends on values, so `torch.where` replaces
the write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def plain_indices(exported: Any) -> Any:
    """Rewrite a program's reads and writes at int32 and bool indices; return the same object if it has none."""
    indices = (index for node in exported.graph.nodes if node.target in _AT_INDICES for index in node.args[1] if index)
    convertible = any(index.meta["val"].dtype in (torch.int32, torch.bool) for index in indices)
    forms = {aten.index.Tensor: _read, aten.index_put.default: _write}
    return exported.run_decompositions(forms) if convertible else exported


def _read(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    wide = _wide(indices)
    return aten.index(x, wide) if wide else NotImplemented


def _write(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    pairs = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(pairs) == 1 and pairs[0][1].dtype == torch.bool:
        return _choice(x, *pairs[0], values, accumulate)
    wide = _wide(indices)
    return aten.index_put(x, wide, values, accumulate) if wide else NotImplemented


def _wide(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return indices with int32 converted to int64; [] if no index is int32."""
    wide = [index if index is None or index.dtype != torch.int32 else index.long() for index in indices]
    return wide if any(one is not other for one, other in zip(wide, indices, strict=True)) else []


def _choice(x: Tensor, axis: int, mask: Tensor, values: Tensor, accumulate: bool) -> Any:
    """Write `x[:, mask] = values` as `torch.where`; `axis` is the mask's first axis in x.

    Return NotImplemented, so that the write stays, if each chosen place gets a value of its own.
    """
    behind = x.ndim - axis - mask.ndim
    sizes = (*(1,) * (axis + 1 + behind - values.ndim), *values.shape)
    if not isinstance(sizes[axis], int) or sizes[axis] != 1:
        return NotImplemented
    values = values.reshape(*sizes[:axis], *(1,) * mask.ndim, *sizes[axis + 1 :])
    return torch.where(mask[(..., *(None,) * behind)], x + values if accumulate else values, x)


aten = torch.ops.aten
_AT_INDICES = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
