"""Whether segments of a graph, one after another, compute what it computes of all their positions at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from txl_runtime.errors import CheckError, UsageError
from txl_runtime.selftest import relative_difference
from txl_runtime.types import Array

from txl_export.families.graph.take.file_module import Call, FileStep
from txl_export.families.own_module.module_call import Eager
from txl_export.families.own_module.sizes import fresh_states, random_inputs
from txl_export.families.own_module.spec import StepSpec

LIMIT = 1e-5
"""How far chained outputs may be from those of all positions at once, relative to the largest."""
SEGMENTS = 6
WHOLE = 3
"""Segments that are also run in shorter ones, or as often as many as it takes for these to end with them."""


def check_opened(spec: StepSpec, step: FileStep, batch: int, lengths: Sequence[int], whole: Call, opened: str) -> None:
    """Hold the graph with its hidden states open against the file, which forgets them after each call.

    Args:
        spec: of the graph.
        step: what it and the file call their tensors.
        batch: B.
        lengths: of segments.
        whole: the file, for positions of several segments.
        opened: the states that were opened, for messages.

    Raises:
        UsageError: the file takes one number of positions, so that nothing shows what a chain should return.
        CheckError: a chain returns something else.
    """
    if not any(entry.axes.positions for entry in spec.inputs):
        raise UsageError(
            f"--open made {opened} explicit, and nothing shows that a chain is right, because a call of the file is "
            "one position; export the module that it was made of"
        )
    for length in lengths:
        inputs, states = _given(spec, batch, length * SEGMENTS), fresh_states(spec, batch)
        feeds = _feeds(step, inputs, states)
        try:
            wanted = whole(feeds)
        except UsageError:
            raise UsageError(
                f"--open made {opened} explicit, and nothing shows that a chain is right, because the file does not "
                f"run with {length * SEGMENTS} positions at once: their number is in its nodes; export it with an open "
                "length, or the module that it was made of"
            ) from None
        found = _chained(spec, inputs, states, batch, length)
        for side in step.outputs:
            apart = _apart(found[side.spec.name], wanted[side.port])
            if not apart <= LIMIT:
                raise CheckError(
                    f"with {opened} carried on, {side.port} of {SEGMENTS} segments of {length} is {apart:.1g} from the "
                    f"file's own run over all of them, expected at most {LIMIT:g}: the file does not compute its "
                    "positions one after another, or forgets something else as well; leave out --open, or export the "
                    "module that it was made of"
                )


def divisible(spec: StepSpec, batch: int, length: int, shorter: int) -> bool:
    """Whether shorter segments give what longer ones give of the same positions, so that part of a segment can run.

    Several segments are run, because a first one may return the same and leave other states behind.
    """
    total = math.lcm(length, shorter) * WHOLE
    inputs, states = _given(spec, batch, total), fresh_states(spec, batch)
    try:
        wanted, found = (_chained(spec, inputs, states, batch, each) for each in (length, shorter))
    except UsageError:
        return False
    return all(_apart(found[name], values) <= LIMIT for name, values in wanted.items())


def _given(spec: StepSpec, batch: int, length: int) -> dict[str, Tensor]:
    samples = spec.samples
    enough = samples is not None and all(
        np.shape(samples[entry.name])[axis] >= length for entry in spec.inputs for axis in entry.axes.positions
    )
    return random_inputs(spec, batch, length, np.random.default_rng(3), samples if enough else None)


def _feeds(step: FileStep, inputs: Mapping[str, Tensor], states: Mapping[str, Tensor | None]) -> dict[str, Array]:
    """By the file's names, which lacks the states that were opened."""
    given = {side.port: inputs[side.spec.name].numpy().astype(side.dtype) for side in step.inputs}
    for side, _ in step.states:
        tensor = states[side.spec.name]
        if side.port in step.shown and tensor is not None:
            given[side.port] = tensor.numpy().astype(side.dtype)
    return given


def _chained(
    spec: StepSpec, inputs: Mapping[str, Tensor], states: Mapping[str, Tensor | None], batch: int, length: int
) -> dict[str, Array]:
    """Outputs of all segments, one behind the other."""
    eager, held, parts = Eager(spec), dict(states), list[dict[str, Tensor]]()
    counts = torch.full((batch,), length, dtype=torch.int32)
    axes = {entry.name: entry.axes.positions for entry in spec.inputs}
    total = max(inputs[name].shape[places[0]] for name, places in axes.items() if places)
    for first in range(0, total, length):
        given = {
            name: tensor.narrow(axes[name][0], first, length) if axes[name] else tensor
            for name, tensor in inputs.items()
        }
        outputs, after = eager(given, held, counts)
        held = dict(after)
        parts.append(outputs)
    joined = {}
    for entry in spec.outputs:
        assert not isinstance(entry, str)
        pieces, places = [part[entry.name] for part in parts], entry.axes.positions
        joined[entry.name] = (torch.cat(pieces, places[0]) if places else pieces[-1]).numpy()
    return joined


def _apart(found: Array, wanted: Array) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    return relative_difference(found, wanted.astype(found.dtype))
