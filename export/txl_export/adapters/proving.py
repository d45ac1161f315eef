"""Checks that an adapter's step computes what the package's own call computes: runs both and compares results.

A package's memory grows row by row; a step has all rows from the start and hides rows that are not filled. Whether
results are equal depends on the package's options, which are too many to list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from txl_runtime.bundle.axes import Axes
from txl_runtime.errors import UsageError

from txl_export.families.own_module.attributes import untouched
from txl_export.families.own_module.module_call import Eager, difference, in_float64
from txl_export.families.own_module.own_code import own_code
from txl_export.families.own_module.sizes import States, fresh_states, random_inputs
from txl_export.families.own_module.spec import StepSpec

Tensors: TypeAlias = Mapping[str, Tensor]
Own: TypeAlias = Callable[[Any, Tensors, Any], tuple[Tensors, Tensors, Any]]
"""(module, inputs, carried) → (outputs, states, carried): the package's own call for one sequence. `carried` is what
the package hands to its next call, and None in the first call. The returned states hold only filled rows."""
LIMIT = 1e-4
"""Largest relative difference that counts as equal: some packages compute parts in float32 even in a float64 module."""


def proven(forms: Sequence[StepSpec], own: Own, lengths: Sequence[int]) -> StepSpec:
    """Return the first of several steps that computes what the package's own call computes.

    Args:
        forms: variants of one module's step; their states have the filled rows at the end.
        own: the package's own call.
        lengths: lengths of the segments that both run, e.g. (8, 4, 8).

    Raises:
        OwnCodeError: the package's own call or a step fails.
        UsageError: no step computes what the package computes.
    """
    for form in forms:
        with torch.no_grad(), untouched(form.module):
            difference = next(_differences(form, own, lengths), "")
        if not difference:
            return form
    raise UsageError(
        f"{difference} is not what {type(forms[0].module).__name__} itself computes with a memory that grows: an "
        "option of it depends on the number of rows; leave that out, or give a StepSpec of your own, with grows="
    )


def _differences(spec: StepSpec, own: Own, lengths: Sequence[int]) -> Iterator[str]:
    """Yield each difference between step and package, e.g. "output logits of segment 2", for two sequences.

    The second sequence starts anew at segment 2. If the step takes `valid`, segments are padded to the longest.
    """
    draws = np.random.default_rng(0)
    segments = [random_inputs(spec, 2, max(lengths) if spec.lengths else length, draws) for length in lengths]
    step = in_float64(spec, 2, max(lengths)) or Eager(spec)
    states = fresh_states(spec, 2, step.dtype)
    expected = [_run(step, own, segments, lengths, sequence) for sequence in (0, 1)]
    for number, (inputs, length) in enumerate(zip(segments, lengths, strict=True)):
        outputs, after = step(inputs, states, torch.full((2,), length, dtype=torch.int32))
        states = dict(after) if number else _second_anew(spec, after, step.dtype)
        for sequence in (0, 1) if number else (0,):
            wanted, held = expected[sequence][number]
            for name, theirs in wanted.items():
                if not _same(_like(outputs[name].narrow(0, sequence, 1), theirs, 0), theirs):
                    yield f"output {name} of segment {number + 1}"
            for entry in spec.states:
                ours, rows = _one(after[entry.name], entry.axes, sequence), held.get(entry.name)
                if rows is not None and not _same(_like(ours, rows, -1), rows):
                    yield f"state {entry.name} after segment {number + 1}"


def _run(
    step: Eager, own: Own, segments: Sequence[Tensors], lengths: Sequence[int], sequence: int
) -> dict[int, tuple[Tensors, Tensors]]:
    """Return the package's outputs and states of a sequence by segment number; sequence 1 has no segment 0."""
    spec, results, carried = step.spec, {}, None
    for number in range(sequence, len(lengths)):
        arrays = {
            entry.name: _one(segments[number][entry.name], entry.axes, sequence, lengths[number])
            for entry in spec.inputs
        }
        with own_code(f"{type(spec.module).__name__} itself fails with its memory"):
            arrays = {name: part.to(step.dtype) if part.is_floating_point() else part for name, part in arrays.items()}
            outputs, held, carried = own(spec.module, arrays, carried)
        results[number] = (outputs, held)
    return results


def _one(tensor: Tensor, axes: Axes, sequence: int, length: int = 0) -> Tensor:
    """Return one sequence of a tensor, cut to its first `length` positions (and lookahead) if it has positions."""
    return tensor[axes.window(0, length, slice(sequence, sequence + 1))]


def _like(ours: Tensor, theirs: Tensor, end: int) -> Tensor:
    """Cut `ours` to the shape of `theirs`, to its first rows (`end` 0) or its last (`end` -1): [1, 8] → [1, 5]."""
    for axis, size in enumerate(theirs.shape):
        ours = ours.narrow(axis, end and max(0, ours.shape[axis] - size), min(size, ours.shape[axis]))
    return ours


def _second_anew(spec: StepSpec, states: Tensors, dtype: torch.dtype) -> States:
    """Return copies of the states in which the second sequence is at its start."""
    fresh, changed = fresh_states(spec, 2, dtype), {name: tensor.clone() for name, tensor in states.items()}
    for entry in spec.states:
        changed[entry.name][entry.axes.at(1)] = cast(Tensor, fresh[entry.name])[entry.axes.at(1)]
    return dict(changed)


def _same(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and difference(ours, theirs) <= LIMIT
