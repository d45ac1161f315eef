"""How far back a model uses its context, measured on a text."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike
from txl_runtime.errors import UsageError
from txl_runtime.listener import Listener, Silent
from txl_runtime.types import Ids

from txl_report.measuring.averages import loss_of
from txl_report.measuring.effective import effective_contexts
from txl_report.measuring.results import ContextLoss, ContextMeasure
from txl_report.measuring.runs import Plan, contexts_of
from txl_report.measuring.texts import Clock, checked_ids, why_not

if TYPE_CHECKING:
    from txl_runtime.model import Model

MOST_COMPARED = 8_192
FEWEST_COMPARED, FEWEST_BLOCKS = 1_000, 16
"""Tokens and blocks of Δ tokens: from fewer no length is told. A tenth of the tokens is then still a hundred."""
LENGTHS = 24
"""How many lengths of context are compared, about."""
FEWEST_LENGTHS = 4
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
    seconds: float | None = 60.0,
    step: int | None = None,
    longest: int | None = None,
    most: int = MOST_COMPARED,
) -> ContextMeasure:
    """Measure the effective context by the rule of Dai et al. 2019 (see `effective`).

    Args:
        model: of any bundle.
        ids: int [T], the text as token ids; its start is used.
        listener: hears how many runs were done.
        seconds: how long it may take: no further token is read then, and fewer lengths are compared where the model
            is slow. None for no limit: then the result depends on the text alone.
        step: Δ; about a 24th of `longest` without it, and a part or a multiple of the segment length.
        longest: the longest context; the smaller of what the model can reach and 3 × (M + L) without it.
        most: tokens that are compared at most.

    Returns:
        What was measured, or the sentence why nothing was.

    Raises:
        UsageError: the ids are not of this model, or `step` or `longest` are not possible.
    """
    clock, listener = Clock(seconds), listener or Silent()
    given, manifest = checked_ids(model, ids), model.manifest
    step, lengths = _lengths(model, step, longest)
    smallest = Plan(step, lengths, max(FEWEST_BLOCKS, -(-FEWEST_COMPARED // step)))
    needed = smallest.targets + 1
    reason = why_not(manifest)
    if manifest.joint:
        reason = "This model's sequences influence one another, so no run has a context of its own."
    elif reason is None and len(given) < needed:
        reason = f"A text of {needed:,} tokens or more is needed, this one has {len(given):,}."
    losses, fed, done = np.zeros((0, 0)), 0, True
    if reason is None:
        if seconds is not None:
            lengths = _affordable(model, given, smallest, seconds)
        blocks = min((len(given) - 1) // step - (lengths - 1), max(smallest.blocks, most // step))
        plan = Plan(step, lengths, blocks)
        losses, fed, done = contexts_of(model, given, plan, listener, clock)
        if losses.shape[1] < smallest.blocks * step:
            losses, reason = losses[:, :0], _too_slow(clock, fed, Plan(step, lengths, smallest.blocks))
        elif not np.isfinite(losses).all():
            losses, reason = losses[:, :0], "Some losses are no finite numbers; see what `verify` says of this bundle."
    return ContextMeasure(
        given=len(given),
        used=(lengths - 1) * step + losses.shape[1] + 1 if losses.size else 0,
        fed=fed,
        compared=losses.shape[1],
        step=step,
        longest=(lengths - 1) * step,
        lengths=None if reason else effective_contexts(losses, step),
        losses=None
        if reason
        else tuple(ContextLoss(index * step, loss_of(row.reshape(1, -1, step))) for index, row in enumerate(losses)),
        complete=done,
        reasons=dict.fromkeys(("lengths", "losses"), reason) if reason else {},
        notes=(ALONE, MINIMUM),
        seconds=clock.seconds,
    )


def _lengths(model: Model, step: int | None, longest: int | None) -> tuple[int, int]:
    """Δ and how many lengths are compared."""
    length, rows, manifest = model.segment_lengths[0], model.memory_length, model.manifest
    if longest is None:
        longest = 3 * (rows + length) if rows else max(256, 4 * length)
        longest = min(longest, manifest.reach or longest)
    exact = manifest.lengths == "exact"
    if step is None:
        sizes = [length * count for count in range(1, max(2, longest // length + 1))]
        while not exact and sizes[0] % 2 == 0:
            sizes.insert(0, sizes[0] // 2)
        step = min(sizes, key=lambda size: abs(np.log(size * LENGTHS / longest)))
    if step < 1 or longest < step or (exact and step % length):
        kind = f"multiples of {length}, because this model takes whole segments" if exact else "at least 1"
        raise UsageError(f"step is {step} and longest is {longest}, expected steps of {kind}, and longest no less")
    return step, max(2, -(-longest // step))


def _too_slow(clock: Clock, fed: int, least: Plan) -> str:
    return (
        f"In {clock.seconds:.0f} seconds the model read {fed:,} of at least {least.cost:,} tokens that this takes; "
        "run it on a faster backend, or give `measure_context` more seconds in Python."
    )


def _affordable(model: Model, ids: Ids, smallest: Plan, seconds: float) -> int:
    """How many lengths fit into a time for the fewest tokens, by the speed of two segments; the least, if none do."""
    length = model.segment_lengths[0]
    length = min(2 * length, (len(ids) - 1) // length * length or len(ids) - 1)
    stream = model.stream()
    tokens = np.repeat(ids[None, : length + 1], model.batch_size, axis=0)
    stream.score(tokens)  # the first call prepares more than later ones
    began = time.monotonic()
    stream.score(tokens)
    budget = 0.5 * seconds * tokens.size / max(time.monotonic() - began, 1e-9)  # half: more tokens than the fewest
    lengths = smallest.lengths
    while lengths > FEWEST_LENGTHS and Plan(smallest.step, lengths, smallest.blocks).cost > budget:
        lengths = max(FEWEST_LENGTHS, lengths * 3 // 4)
    return lengths
