"""How far rounding alone takes a Transformer-XL: the reference in float32 against itself in float64, in the same
segments.

Scores that are large make one key of many win, and then a last digit decides which. Every layer adds to what the layer
below it leaves, and memory hands it on to later segments. No two computations of such a model in float32 stay together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from txl_runtime.types import Ids

from txl_export.families.transformer_xl.parity.oracle import ReferenceStreams
from txl_export.families.transformer_xl.reference import Reference
from txl_export.proof.distributions import or_infinite

MOST_PARAMETERS = 200_000_000
"""A larger model is not computed in float64, which takes twice its memory once more."""


def own_rounding(
    reference: Reference, calls: Sequence[tuple[Ids, Ids]], form: str, every: int = 1, alone: bool = False
) -> tuple[float, float] | None:
    """The largest differences of log-probabilities, and of the memory, relative to max(1, its largest value so far).

    Args:
        reference: the model, in either precision.
        calls: tokens [b, T] and lengths [b] of each segment.
        form: of the memory, as the bundle keeps it.
        every: the memory is compared after each so many segments, and after the last.
        alone: every tensor of the memory is measured by its own largest value, as the self-test does.

    Returns:
        None for a model that is too large to be computed in float64.
    """
    if reference.parameters > MOST_PARAMETERS:
        return None
    sides = (reference.in_precision(dtype) for dtype in (torch.float64, torch.float32))
    both = [ReferenceStreams(side, len(calls[0][1])) for side in sides]
    logprobs, memory, scale = 0.0, 0.0, 1.0
    for number, (tokens, counts) in enumerate(calls):
        exact, rounded = (side.step(tokens, counts) for side in both)
        logprobs = max(logprobs, or_infinite(float(np.abs(exact - rounded).max(initial=0))))
        if reference.memory_length and (number % every == 0 or number == len(calls) - 1):
            for (_, rows), (_, other) in zip(*(side.memory(form) for side in both), strict=True):
                largest = float(np.abs(rows).max(initial=1))
                scale = largest if alone else max(scale, largest)
                memory = max(memory, or_infinite(float(np.abs(rows - other).max(initial=0))) / scale)
    return logprobs, memory
