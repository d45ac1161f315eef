"""Values that a step reads of constants, so that `torch.export` goes on where it knows none.

`if mask.any():` of a mask that sizes make, and `assert x.size(1) == lengths.max().item()` of lengths that are a list,
come out the same in every call. `torch.export` knows no values and stops at both. So where it has stopped, the step is
run once on inputs without values, while all else has its own: what is read then of a tensor with values is a constant.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from txl_export.families.own_module.own_code import in_the_step, place_of

_TO_PYTHON = frozenset(
    {
        *("item", "tolist", "numpy", "__array__", "__dlpack__", "equal", "allclose", "is_nonzero", "__contains__"),
        *("__bool__", "__int__", "__float__", "__index__", "__complex__"),
    }
)
"""Functions that give Python the values of a tensor."""


class Reads(TorchFunctionMode):
    """Notes what Python reads while a step runs, or gives again what was noted.

    Args:
        noted: what an earlier run of the same step has found; given in its order.

    Attributes:
        found: of each read the function's name and its result, None where it depends on the inputs.
        gradients: where the step switches gradients on, as it stands behind a message; "" if it does not.
    """

    def __init__(self, noted: Sequence[tuple[str, Any]] = ()) -> None:
        super().__init__()
        self._noted = iter(noted)
        self.found: list[tuple[str, Any]] = []
        self.gradients = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, unless it is a read whose result was noted."""
        given, name = kwargs or {}, getattr(func, "__name__", "")
        if func is torch._C._set_grad_enabled and args[0]:
            self.gradients = self.gradients or place_of(in_the_step(traceback.extract_stack()))
        if name not in _TO_PYTHON:
            return func(*args, **given)
        known, value = next(self._noted, ("", None))
        if known != name or value is None:
            value = func(*args, **given)
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, given))):
            self.found.append((name, None))
        elif name == "tolist":  # which tensors without values do number by number
            self.found += [("item", number) for number in tree_leaves(value)]
        else:
            self.found.append((name, value))
        return value


def constant_reads(network: nn.Module, given: Sequence[Tensor]) -> Reads:
    """Run the network on arguments without values, and note what Python reads of constants as far as it gets."""
    fakes, reads = _WithoutValues(shape_env=ShapeEnv(), allow_non_fake_inputs=True), Reads()
    arguments = [fakes.from_tensor(tensor, static_shapes=True) for tensor in given]
    with contextlib.suppress(Exception), reads:
        network(*arguments)
    return reads


class _WithoutValues(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Tensors that have sizes alone; what they are computed into has none either."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = MappingProxyType({})) -> Any:
        """Run an operator; the end where it writes what depends on the inputs over a tensor that has values."""
        written = [*args[:1], *kwargs.values()] if func._schema.is_mutable else []
        if any(isinstance(one, Tensor) and not isinstance(one, FakeTensor) for one in written):
            raise RuntimeError("its values would be those of before")
        return super().__torch_dispatch__(func, types, args, kwargs)
