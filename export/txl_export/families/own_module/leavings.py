"""Attributes that every call leaves behind and no later call reads, such as attention maps that are kept to be drawn.

They are no state. The step is called so that it leaves none of them; what a later call may read is left to be refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from txl_export.families.own_module.attributes import put, same_bits, untouched, value_at
from txl_export.families.own_module.keeping import kept_of_a_call
from txl_export.families.own_module.probing import Tries
from txl_export.families.own_module.running import Eager, called
from txl_export.families.own_module.sizes import fresh_states
from txl_export.families.own_module.spec import VALID, Named, StepSpec

_SEGMENTS = 4
"""So many calls in a row are looked at."""


def leavings(tries: Tries, lengths: Sequence[int]) -> list[str]:
    """The paths of such attributes of a module.

    Of some segments in a row none may touch the tensors that those before it left, not even ask for their sizes, and
    each has to compute the same where they are put back after every call.

    Args:
        tries: of the module.
        lengths: every L.
    """
    module = tries.eager.spec.module
    declared = {entry.attribute for entry in tries.eager.spec.states}
    start = fresh_states(tries.eager.spec, tries.batch_size, tries.eager.dtype)
    with untouched(module):
        _, kept = kept_of_a_call(tries.eager, tries.inputs(lengths[0]), start, tries.valid(lengths[0]))
    paths = [path for path in kept if path not in declared and _is_plain(module, path)]
    for length in lengths if paths else ():
        chain = [tries.inputs(length) for _ in range(_SEGMENTS)]
        with untouched(module):
            found, touched = _run(tries, chain, length, paths)
        with untouched(module):
            expected, _ = _run(Tries(Eager(without(tries.eager.spec, paths)), tries.batch_size), chain, length, ())
        same = all(same_bits(one, other) for one, other in zip(found, expected, strict=True))
        paths = [path for path in paths if path not in touched] if same else []
    return paths


def without(spec: StepSpec, paths: Sequence[str]) -> StepSpec:
    """The same step, which puts back after each call what stood at some paths of its module."""

    def step(module: Any, inputs: Named, states: Named) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        kept = {path: value_at(module, path) for path in paths}
        given = {name: tensor for name, tensor in inputs.items() if name != VALID}
        try:
            return called(replace(spec, module=module), given, states, inputs.get(VALID))
        finally:
            for path, value in kept.items():
                put(module, path, value)

    return replace(spec, step=step)


def _is_plain(module: Any, path: str) -> bool:
    """Whether something stands there before the first call that can be set, and no parameter or buffer."""
    own = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    try:
        put(module, path, value_at(module, path))
    except (LookupError, TypeError, AttributeError):
        return False
    return path not in own


def _run(
    tries: Tries, chain: Iterable[Mapping[str, Tensor]], length: int, paths: Sequence[str]
) -> tuple[list[Tensor], set[str]]:
    """What a chain of segments computes, and which of the paths' tensors a later call touched."""
    eager, results, touched = tries.eager, list[Tensor](), set[str]()
    states: Mapping[str, Tensor | None] = fresh_states(eager.spec, tries.batch_size, eager.dtype)
    for inputs in chain:
        with _Touching({path: value_at(eager.spec.module, path) for path in paths}) as touching:
            outputs, states = eager(inputs, states, tries.valid(length))
        touched |= touching.touched
        results += [*outputs.values(), *states.values()]
    return results, touched


class _Touching(TorchFunctionMode):
    """Watches for calls of torch, properties such as sizes among them, that are given some tensors or their memory.

    Attributes:
        touched: the names of those that were.
    """

    def __init__(self, watched: Mapping[str, Any]) -> None:
        super().__init__()
        self.touched = set[str]()
        self._watched = {name: value for name, value in watched.items() if isinstance(value, Tensor)}
        self._memory = {name: value.untyped_storage()._cdata for name, value in self._watched.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function, and note which tensors it is given."""
        with torch._C.DisableTorchFunction():
            given = {
                leaf.untyped_storage()._cdata
                for leaf in tree_leaves((args, dict(kwargs or {})))
                if isinstance(leaf, Tensor)
            }
            self.touched |= {name for name, memory in self._memory.items() if memory in given}
        return func(*args, **(kwargs or {}))
