"""Supplies values of constants that a step reads in Python, where `torch.export` knows no values and stops.

Two examples: `if mask.any():` for a mask made from sizes, and `assert x.size(1) == lengths.max().item()` for lengths
from a list. The result is the same in every call. So the step runs once on inputs that have no values, while all other
tensors have values: each value that Python reads in this run is a constant.
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
"""Names of functions that hand a tensor's values to Python."""


class Reads(TorchFunctionMode):
    """Records the values that Python reads while a step runs, or replays such a record.

    Args:
        noted: the record of an earlier run of the same step, replayed in order.

    Attributes:
        found: the function's name and result of each read; the result is None if it depends on the inputs.
        gradients: the place where the step switches gradients on, e.g. " (model.py:12: …)"; "" if it does not.
    """

    def __init__(self, noted: Sequence[tuple[str, Any]] = ()) -> None:
        super().__init__()
        self._noted = iter(noted)
        self.found: list[tuple[str, Any]] = []
        self.gradients = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function; a read whose result is in the record returns that result."""
        named, name = kwargs or {}, getattr(func, "__name__", "")
        if func is torch._C._set_grad_enabled and args[0]:
            self.gradients = self.gradients or place_of(in_the_step(traceback.extract_stack()))
        if name not in _TO_PYTHON:
            return func(*args, **named)
        known, value = next(self._noted, ("", None))
        if known != name or value is None:
            value = func(*args, **named)
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, named))):
            self.found.append((name, None))
        elif name == "tolist":  # torch reads a list without values number by number, with item
            self.found += [("item", number) for number in tree_leaves(value)]
        else:
            self.found.append((name, value))
        return value


def constant_reads(network: nn.Module, given: Sequence[Tensor]) -> Reads:
    """Run the network on arguments without values; return the record of what Python read, up to the first error.

    For example, `given` is x [2, 8] and h [2, 32].
    """
    fakes, reads = _WithoutValues(shape_env=ShapeEnv(), allow_non_fake_inputs=True), Reads()
    arguments = [fakes.from_tensor(tensor, static_shapes=True) for tensor in given]
    with contextlib.suppress(Exception), reads:
        network(*arguments)
    return reads


class _WithoutValues(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode in which input tensors have sizes but no values; results that depend on inputs have no values, either."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = MappingProxyType({})) -> Any:
        """Run an operator; refuse to write a result without values over a tensor that has values."""
        written = [*args[:1], *kwargs.values()] if func._schema.is_mutable else []
        if any(isinstance(one, Tensor) and not isinstance(one, FakeTensor) for one in written):
            raise RuntimeError("its values would be those of before")
        return super().__torch_dispatch__(func, types, args, kwargs)
