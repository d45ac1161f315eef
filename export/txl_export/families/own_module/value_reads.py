"""Follows what depends on the values that a step is given, to where it is kept afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SIZES_ALONE = frozenset(
    {
        *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "empty_strided"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
    }
)
"""Operators that read of their first argument nothing but its size and kind."""


class Following(TorchDispatchMode):
    """Follows memory that holds anything computed from the values of some tensors.

    Args:
        given: the tensors.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held: dict[int, Any] = {}
        self._mark(given)

    def depends(self, values: Any) -> bool:
        """Whether any tensor among these is in such memory."""
        return any(_memory(leaf)[0] in self._held for leaf in tree_leaves(values) if isinstance(leaf, Tensor))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and mark what it returns and writes if anything that it takes is marked."""
        depends = self.depends((args, dict(kwargs or {})))
        result = func(*args, **(kwargs or {}))
        if depends and func._schema.name.removeprefix("aten::") not in _SIZES_ALONE:
            self._mark(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
            self._mark(_written(func, args, kwargs or {}))
        return result

    def _mark(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            key, memory = _memory(tensor)
            self._held[key] = memory  # held: it is not given to others


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[Tensor]:
    """The arguments that an operator writes to."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _memory(tensor: Tensor) -> tuple[int, Any]:
    """A tensor's memory and its number; a tensor without memory of its own, such as a sparse one, stands for itself."""
    try:
        memory = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return id(tensor), tensor
    return int(memory._cdata), memory
