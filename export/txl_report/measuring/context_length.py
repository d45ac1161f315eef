"""How far back a model uses its context, measured on a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike
from txl_runtime.errors import UsageError
from txl_runtime.listener import Listener, Silent
from txl_runtime.streaming.inputs import refusal

from txl_report.facts.plain import Missing
from txl_report.measuring.averages import loss_of
from txl_report.measuring.effective import effective_contexts
from txl_report.measuring.results import ContextLoss, ContextMeasure
from txl_report.measuring.runs import Plan, contexts_of
from txl_report.measuring.texts import checked_ids, fewer

if TYPE_CHECKING:
    from txl_runtime.model import Model

MOST_COMPARED = 8_192
"""Tokens; a large model's are `fewer`."""
FEWEST_COMPARED, FEWEST_BLOCKS = 1_000, 16
"""Tokens and blocks of Δ tokens: from fewer no length is told. A tenth of the tokens is then still a hundred."""
LENGTHS = 24
"""How many lengths of context are compared, about."""
ALONE = (
    "The paper compares a group of models; here the group is this one model. The rule is the same, but the numbers can "
    "be compared with the paper's in kind only."
)
MINIMUM = (
    "By the rule a token counts with the smaller of its two losses, so losses that merely differ count as a gain and "
    "the length leans upwards. The plain length takes every loss as it is."
)


def measure_context(
    model: Model,
    ids: ArrayLike,
    listener: Listener | None = None,
    *,
    step: int | None = None,
    longest: int | None = None,
    most: int | None = None,
) -> ContextMeasure | Missing:
    """Measure the effective context by the rule of Dai et al. 2019 (see `effective`).

    Args:
        model: of any bundle.
        ids: int [T], the text as token ids; its start is used.
        listener: hears how many runs were done.
        step: Δ; about a 24th of `longest` without it, and a part or a multiple of the segment length.
        longest: the longest context; the smaller of what the model can reach and 3 × (M + L) without it.
        most: tokens that are compared at most; 8,192 without it, 2,048 of a large model, and always enough for a
            number. The same model and text always give the same numbers.

    Returns:
        What was measured, or why nothing was.

    Raises:
        UsageError: the ids are not of this model, or `step` or `longest` are not possible.
    """
    listener = listener or Silent()
    given, manifest = checked_ids(model, ids), model.manifest
    step, lengths = _lengths(model, step, longest)
    smallest = Plan(step, lengths, max(FEWEST_BLOCKS, -(-FEWEST_COMPARED // step)))
    needed = smallest.targets + 1
    reason = refusal(manifest, "score")
    if not manifest.can.run_fewer:
        reason = "This model's sequences influence one another, so no run has a context of its own."
    elif not reason and len(given) < needed:
        reason = f"A text of {needed:,} tokens or more is needed, this one has {len(given):,}."
    if reason:
        return Missing(reason)
    most = fewer(manifest, MOST_COMPARED) if most is None else most
    blocks = min((len(given) - 1) // step - (lengths - 1), max(smallest.blocks, most // step))
    losses = contexts_of(model, given, Plan(step, lengths, blocks), listener)
    if not np.isfinite(losses).all():
        return Missing("Some losses are no finite numbers; see what `verify` says of this bundle.")
    return ContextMeasure(
        given=len(given),
        used=(lengths - 1) * step + losses.shape[1] + 1,
        compared=losses.shape[1],
        step=step,
        longest=(lengths - 1) * step,
        lengths=effective_contexts(losses, step),
        losses=tuple(ContextLoss(index * step, loss_of(row.reshape(1, -1, step))) for index, row in enumerate(losses)),
        notes=(ALONE, MINIMUM),
    )


def _lengths(model: Model, step: int | None, longest: int | None) -> tuple[int, int]:
    """Δ and how many lengths are compared."""
    length, rows, manifest = model.segment_lengths[0], model.memory_length, model.manifest
    if longest is None:
        longest = 3 * (rows + length) if rows else max(256, 4 * length)
        longest = min(longest, manifest.reach or longest)
    exact = not manifest.can.run_ragged
    if step is None:
        sizes = [length * count for count in range(1, max(2, longest // length + 1))]
        while not exact and sizes[0] % 2 == 0:
            sizes.insert(0, sizes[0] // 2)
        step = min(sizes, key=lambda size: abs(np.log(size * LENGTHS / longest)))
    if step < 1 or longest < step or (exact and step % length):
        kind = f"multiples of {length}, because this model takes whole segments" if exact else "at least 1"
        raise UsageError(f"step is {step} and longest is {longest}, expected steps of {kind}, and longest no less")
    return step, max(2, -(-longest // step))
