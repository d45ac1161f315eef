"""Whether a call leaves anything in the module that depends on what it was given, whatever its values are.

A largest value so far may not change while a module is tried, and is a state all the same. A table of sizes is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from txl_export.families.own_module.attributes import tensors
from txl_export.families.own_module.running import Eager
from txl_export.families.own_module.sizes import States
from txl_export.families.own_module.value_reads import Following


def kept_of_a_call(
    eager: Eager,
    inputs: Mapping[str, Tensor],
    states: Mapping[str, Tensor | None],
    valid: Tensor,
    other: Callable[[], Any] | None = None,
) -> tuple[States, list[str]]:
    """Run one step; the states after it, and the paths of tensors that then depend on its inputs and states.

    Args:
        eager: the module.
        inputs, states, valid: as `Eager` takes them.
        other: gives what to look at after the call in place of the module; what the module has as well is left out.

    Raises:
        OwnCodeError, UsageError: as `Eager`.
    """
    given = {name: tensor.clone() for name, tensor in inputs.items()}
    held = {name: None if tensor is None else tensor.clone() for name, tensor in states.items()}
    marked = [*given.values(), valid, *(tensor for tensor in held.values() if tensor is not None)]
    with torch.no_grad(), Following(marked) as following:
        step = eager.checked(given, held, valid)
    kept = {id(tensor): path for path, tensor in tensors(eager.spec.module) if following.depends(tensor)}
    if other is not None:
        kept = {
            id(tensor): path
            for path, tensor in tensors(other())
            if id(tensor) not in kept and following.depends(tensor)
        }
    return {name: tensor.clone() for name, tensor in step.after.items()}, list(kept.values())
