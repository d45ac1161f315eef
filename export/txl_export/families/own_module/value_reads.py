"""Follows what depends on the values that a step is given: where Python reads it, and where it is kept afterwards.

Python that decides by a value is not in a graph of one run, and memory that holds one from call to call is a state.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from txl_export.families.own_module.own_code import is_users

UNKNOWN = "an unknown place"
_READS = frozenset({"aten._local_scalar_dense.default", "aten.equal.default", "aten.is_nonzero.default"})
"""Operators whose results are Python's."""
_SIZES_ALONE = frozenset(
    {
        *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "empty_strided"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
    }
)
"""Operators that read of their first argument nothing but its size and kind."""
_TO_PYTHON = frozenset(
    {
        *("item", "tolist", "numpy", "__array__", "__dlpack__", "equal", "allclose", "is_nonzero", "__contains__"),
        *("__bool__", "__int__", "__float__", "__index__", "__complex__"),
    }
)
"""Functions that give Python the values of a tensor."""


@dataclass(frozen=True)
class Reads:
    """Where a run reads values that depend on its arguments, e.g. "model.py:12"; None if nowhere.

    Attributes:
        anywhere: also inside an operator, and by a size that depends on values.
        by_python: where the user's Python is given the values.
        gradients: where gradients are switched on, to be computed in the step.
    """

    anywhere: str | None = None
    by_python: str | None = None
    gradients: str | None = None


def value_reads(network: nn.Module, given: Sequence[Tensor]) -> Reads:
    """Where a run of the network reads a value that depends on its arguments.

    Values of constants and parameters may be read: they are the same in every run.
    """
    following = Following(given)
    calls = _Calls(following)
    with torch.no_grad(), following, calls:
        network(*given)
    return Reads(following.place or calls.place, calls.place, calls.gradients)


class Following(TorchDispatchMode):
    """Follows memory that holds anything computed from the values of some tensors.

    Args:
        given: the tensors.

    Attributes:
        place: where a value was read first, inside an operator as well; None if none was.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place: str | None = None
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
        if depends and self.place is None and _reads_values(func, args):
            self.place = _here()
        result = func(*args, **(kwargs or {}))
        if depends and func._schema.name.removeprefix("aten::") not in _SIZES_ALONE:
            self._mark(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
            self._mark(_written(func, args, kwargs or {}))
        return result

    def _mark(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            key, memory = _memory(tensor)
            self._held[key] = memory  # held: it is not given to others


class _Calls(TorchFunctionMode):
    """Watches for functions that give Python values; some of them do so without an operator.

    Attributes:
        place: where the first one was called with what depends on the arguments.
        gradients: where gradients were switched on first.
    """

    def __init__(self, following: Following) -> None:
        super().__init__()
        self.place: str | None = None
        self.gradients: str | None = None
        self._following = following

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function, and keep the place if it gives values."""
        named = getattr(func, "__name__", "") in _TO_PYTHON
        if named and self.place is None and self._following.depends((args, dict(kwargs or {}))):
            self.place = _here()
        if func is torch._C._set_grad_enabled and args[0] and self.gradients is None:
            self.gradients = _here()
        return func(*args, **(kwargs or {}))


def _reads_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether Python is given values, or sizes that depend on them; a tensor that is printed decides nothing."""
    if str(func) == "aten.index.Tensor":  # by numbers its size is known, by truth values it is not
        found = any(isinstance(leaf, Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in args[1])
    else:
        tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
        found = str(func) in _READS or any(tag in func.tags for tag in tags)
    return found and not any(frame.filename.endswith("_tensor_str.py") for frame in traceback.extract_stack())


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


def _here() -> str:
    frames = [frame for frame in traceback.extract_stack() if is_users(frame.filename)]
    return f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else UNKNOWN
