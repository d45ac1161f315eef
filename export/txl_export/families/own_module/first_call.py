"""What a module does to its weights at its first call in evaluation mode is done once, before anything is tried.

Some scale their weights then, and remember in a flag that they did. After a trial attributes are put back and contents
of tensors are not, so that the weights would be scaled again and again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from txl_runtime.errors import UsageError

from txl_export.families.own_module.attributes import changed, leaves, untouched, value_at
from txl_export.families.own_module.keeping import kept_of_a_call
from txl_export.families.own_module.probing import Tries, check_outside
from txl_export.families.own_module.running import Eager
from txl_export.families.own_module.sizes import fresh_states, has_length
from txl_export.families.own_module.spec import StepSpec

USUAL_LENGTHS = (64, 1)
"""Tried where none are given."""


def run_first_call(spec: StepSpec, batch_size: int, segment_lengths: Sequence[int]) -> None:
    """Let a module change its weights as it does at its first call, if that does not depend on what it is given.

    What depends on it is state; the module is then as it was, and what follows refuses it. Its modes stay as they are.

    Args:
        spec: of the module.
        batch_size: B.
        segment_lengths: L's asked for, of which the first is used that the module takes.

    Raises:
        UsageError: it keeps what depends on its inputs outside of itself, which only its first calls may show.
    """
    module, modes = spec.module, {part: part.training for part in spec.module.modules()}
    lengths = tuple(segment_lengths) or (USUAL_LENGTHS if has_length(spec) else (1,))
    before, tries = leaves(module), Tries(Eager(spec), batch_size)
    try:
        check_outside(tries, lengths)
        for length in lengths:
            with contextlib.suppress(UsageError):
                _run(tries, length, before)
                break
    finally:
        for part, mode in modes.items():
            part.training = mode


def _run(tries: Tries, length: int, before: Mapping[str, Any]) -> None:
    module, inputs = tries.eager.spec.module, tries.inputs(length)
    states = fresh_states(tries.eager.spec, tries.batch_size, tries.eager.dtype)
    with untouched(module):
        _, kept = kept_of_a_call(tries.eager, inputs, states, tries.valid(length))
    moved = [path for path in changed(before, leaves(module)) if isinstance(before.get(path), Tensor)]
    with torch.no_grad():
        for path in moved:
            value_at(module, path).copy_(before[path])
    if moved and not kept:
        tries.eager(inputs, states, tries.valid(length))
