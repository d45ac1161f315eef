"""Tests whether sequences of a batch are independent: changes a sequence's neighbours and compares its results."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, TypeAlias

import torch
from txl_runtime.bundle.axes import Axes
from txl_runtime.errors import UsageError

from txl_export.families.own_module.attributes import same_bits
from txl_export.families.own_module.module_call import Tries, difference
from txl_export.families.own_module.stages import shapes_of

Named: TypeAlias = dict[str, Any]
_PLACES = 1e-4
"""Largest relative difference by which a sequence's results may depend on its place in the batch: matrix products round
differently at different places."""
_FAR = 1e4
"""Factor on the neighbours' float inputs in one trial, so that code like `if x.abs() > 100` shows."""
_SEED = 4
"""Seed of the inputs. It was chosen: a file in half precision rounds differently by place for 1 in 10 inputs, and 4 of
24 seeds would have shown that."""


def dependence(tries: Tries, length: int) -> str:
    """Return the reason why the sequences of a batch must run together; "" if they are independent."""
    spec = tries.eager.spec
    for state in spec.states:
        if state.grows is not None or state.initial is None:
            return f"state {state.name} {'grows' if state.grows is not None else 'is absent at first'}"
    for what, one in (*(("state", one) for one in spec.states), *(("output", one) for one in spec.output_specs)):
        if one.axes.batch is None:
            return f"{what} {one.name} has no batch axis"
    return influence(tries, length)


def influence(tries: Tries, length: int) -> str:
    """Return a sentence on how sequences of a batch influence one another; "" if they do not.

    For example, of three sequences the first runs next to two that hold other values, then large values, NaN, and their
    initial states. The first then starts anew next to two that hold later states. At last all three change places.
    """
    if tries.batch_size == 1:
        return ""
    tries = Tries(tries.eager, tries.batch_size, _SEED)
    spec, last, valid = tries.eager.spec, tries.batch_size - 1, tries.valid(length)
    kinds = (("input", spec.inputs), ("state", spec.states), ("output", spec.output_specs))
    axes = {f"{kind} {one.name}": one.axes for kind, entries in kinds for one in entries}

    def run(given: Named) -> Named:
        inputs, states = ({one.name: given[f"{kind} {one.name}"] for one in entries} for kind, entries in kinds[:2])
        outputs, after = tries.eager(inputs, states, valid)
        results = _called(output=outputs, state=after)
        return {name: tensor for name, tensor in results.items() if axes[name].batch is not None}

    usual, others = (_called(input=tries.inputs(length), state=tries.states(length)) for _ in range(2))
    first = usual | _called(state=tries.fresh())
    floats = {name for name, tensor in others.items() if tensor is not None and tensor.is_floating_point()}
    large = others | {name: others[name] * _FAR for name in floats if name.startswith("input")}
    spoilt = others | {name: torch.full_like(others[name], torch.nan) for name in floats}
    tried = [("a sequence", usual, {"other values": others, "large values": large, "NaN": spoilt})]
    if shapes_of(first) == shapes_of(usual):  # only a reset brings an initial state next to a later state
        tried[0][2]["the first state"] = first
        tried.append(("a sequence that was just reset", first, {"later states": usual}))
    for whose, own, beside in tried:
        expected = run(own)
        for (what, theirs), row in product(beside.items(), (0, last)):
            try:
                results = run({name: _mixed(axes[name], own[name], theirs[name], row) for name in own})
            except UsageError as error:
                return f"a batch cannot be run where one sequence holds {what}: {error}"
            for name, tensor in results.items():
                if not same_bits(axes[name].one(tensor, row), axes[name].one(expected[name], row)):
                    return f"{name} of {whose} changes with {what} in its neighbours"
    for given in (usual, others):
        movable = {name for name, one in given.items() if one is not None and axes[name].batch is not None}
        results, turned = run(given), run(given | {name: given[name].flip(axes[name].batch) for name in movable})
        # rows are compared one by one, because the difference is relative to the row's values
        for name, row in product(results, range(last + 1)):
            if not difference(axes[name].one(turned[name], last - row), axes[name].one(results[name], row)) <= _PLACES:
                return f"{name} of a sequence changes with its place in the batch"
    return ""


def _called(**kinds: Mapping[str, Any]) -> Named:
    """Return tensors by the names that messages use, e.g. "state h"."""
    return {f"{kind} {name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}


def _mixed(axes: Axes, own: Any, other: Any, row: int) -> Any:
    """Return the batch `other` with the sequence `row` of `own` in place of its own."""
    if axes.batch is None or own is None or other is None:
        return own
    mixed = other.clone()
    mixed[axes.at(row)] = own[axes.at(row)]
    return mixed
