"""Finds where a step reads a value of what it is given: Python that decides by it is not in a graph of one run."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from txl_export.families.own_module.own_code import is_users

_READS = frozenset({"aten._local_scalar_dense.default", "aten.equal.default", "aten.is_nonzero.default"})
"""Operators whose results are Python's."""


def value_read(network: nn.Module, given: Sequence[Tensor]) -> str | None:
    """Where a run of the network reads a value that depends on its arguments, e.g. "model.py:12"; None if nowhere.

    Values of constants and parameters may be read: they are the same in every run.
    """
    following = _Following(given)
    with torch.no_grad(), following:
        network(*given)
    return following.place


class _Following(TorchDispatchMode):
    """Follows memory that holds anything computed from the arguments."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place: str | None = None
        self._held: dict[int, Any] = {}
        self._mark(given)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and mark what it returns and writes if anything that it takes is marked."""
        taken = [leaf for leaf in tree_leaves((args, dict(kwargs or {}))) if isinstance(leaf, Tensor)]
        depends = any(self._key(tensor) in self._held for tensor in taken)
        if depends and str(func) in _READS and self.place is None:
            self.place = _here()
        result = func(*args, **(kwargs or {}))
        if depends:
            self._mark([leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)])
            if func._schema.is_mutable:
                self._mark(taken[:1])
        return result

    def _mark(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._held[self._key(tensor)] = tensor.untyped_storage()  # held: its memory is not given to others

    def _key(self, tensor: Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)


def _here() -> str:
    frames = [frame for frame in traceback.extract_stack() if is_users(frame.filename)]
    return f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else "an unknown place"
