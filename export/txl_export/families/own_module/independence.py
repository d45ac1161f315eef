"""A trial of independence: a sequence's neighbours are changed, spoilt, reset and moved; its results may not differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from txl_runtime.errors import UsageError

from txl_export.families.own_module.attributes import same_bits
from txl_export.families.own_module.module_call import Tries, difference
from txl_export.families.own_module.sizes import States, output_specs
from txl_export.families.own_module.spec import InputSpec, StateSpec, StepSpec
from txl_export.families.own_module.stages import shapes_of

Entries: TypeAlias = Sequence[InputSpec] | Sequence[StateSpec]
_PLACES = 1e-4
"""Relative difference by which a sequence's results may depend on its place in the batch."""
_FAR = 1e4
"""By so much are neighbours' values multiplied, so that a branch on large values shows."""


def dependence(tries: Tries, length: int) -> str:
    """Why the sequences of a batch have to run together; "" where each is what it would be alone.

    Neighbours read and hold something else, then values far from usual, then NaN; they are at their first state while
    the sequence is further on, and the other way round; then sequences change places.
    """
    spec = tries.eager.spec
    for entry in spec.states:
        if entry.axes.batch is None:
            return f"state {entry.name} has no batch axis"
        if entry.grows is not None or entry.initial is None:
            return f"state {entry.name} {'grows' if entry.grows is not None else 'is absent at first'}"
    for output in output_specs(spec):
        if output.axes.batch is None:
            return f"output {output.name} has no batch axis"
    return influence(tries, length)


def influence(tries: Tries, length: int) -> str:
    """How sequences of a batch influence one another; "" where they do not."""
    batch = tries.batch_size
    if batch == 1:
        return ""
    return _neighbours(tries, length, 0) or _neighbours(tries, length, batch - 1) or _places(tries, length)


def _neighbours(tries: Tries, length: int, row: int) -> str:
    """What of one sequence changes with the others."""
    spec, inputs, states, valid = tries.eager.spec, tries.inputs(length), tries.states(length), tries.valid(length)
    others, held, first = tries.inputs(length), tries.states(length), tries.fresh()
    begun: list[tuple[str, Mapping[str, Tensor | None], States]] = [
        ("other values", others, held),
        ("large values", _far(others), held),
        ("NaN", _spoilt(others), _spoilt(held)),
    ]
    tried = [("a sequence", states, begun)]
    if shapes_of(first) == shapes_of(states):  # only a reset brings both together in a batch
        begun.append(("the first state", inputs, first))
        tried.append(("a sequence that was just reset", first, [("later states", inputs, states)]))
    for whose, own, cases in tried:
        expected = _rows(spec, tries.eager(inputs, own, valid), row)
        for what, given, kept in cases:
            mixed = _mixed(spec.inputs, inputs, given, row), _mixed(spec.states, own, kept, row)
            try:
                results = tries.eager(*mixed, valid)
            except UsageError as error:
                return f"a batch cannot be run where one sequence holds {what}: {error}"
            for name, tensor in _rows(spec, results, row).items():
                if not same_bits(tensor, expected[name]):
                    return f"{name} of {whose} changes with {what} in its neighbours"
    return ""


def _places(tries: Tries, length: int) -> str:
    """What of a sequence changes with its place."""
    spec, inputs, states, valid = tries.eager.spec, tries.inputs(length), tries.states(length), tries.valid(length)
    results = tries.eager(inputs, states, valid)
    turned = tries.eager(_turned(spec.inputs, inputs), _turned(spec.states, states), valid)
    for row in range(tries.batch_size):
        expected = _rows(spec, results, row)
        for name, tensor in _rows(spec, turned, tries.batch_size - 1 - row).items():
            if not difference(tensor, expected[name]) <= _PLACES:
                return f"{name} of a sequence changes with its place in the batch"
    return ""


def _mixed(
    entries: Entries, ours: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None], row: int
) -> dict[str, Any]:
    """One sequence of the first tensors among others of the second."""
    mixed: dict[str, Any] = {}
    for entry in entries:
        own, other = ours[entry.name], theirs[entry.name]
        mixed[entry.name] = own
        if entry.axes.batch is not None and own is not None and other is not None:
            mixed[entry.name] = other.clone()
            mixed[entry.name][entry.axes.at(row)] = own[entry.axes.at(row)]
    return mixed


def _turned(entries: Entries, tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """The sequences in the opposite order."""
    turned: dict[str, Any] = {}
    for entry in entries:
        axis, tensor = entry.axes.batch, tensors[entry.name]
        turned[entry.name] = tensor if tensor is None or axis is None else tensor.flip(axis)
    return turned


def _far(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same, far from usual; whole numbers may be rows of a table and stay."""
    return {name: tensor * _FAR if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _spoilt(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """NaN wherever there can be."""
    return {
        name: torch.full_like(tensor, torch.nan) if tensor is not None and tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def _rows(spec: StepSpec, results: tuple[Mapping[str, Tensor], Mapping[str, Tensor]], row: int) -> dict[str, Tensor]:
    """What one sequence got, by what to call it in a message."""
    found = {}
    for output in output_specs(spec):
        if output.axes.batch is not None:
            found[f"output {output.name}"] = output.axes.one(results[0][output.name], row)
    for state in spec.states:
        if state.axes.batch is not None:
            found[f"state {state.name}"] = state.axes.one(results[1][state.name], row)
    return found
