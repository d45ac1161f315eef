"""Measure the length of context that a model uses, on a text, by the rule of Dai et al. 2019 (appendix C).

For a group of models, here of one, b(c, t) is the smallest loss of token t with a context of c tokens. For two lengths
c < c', a model's relative loss f(c, c') is the mean of min(b(c, t), l(c', t)) over the tenth of the tokens with the
largest b(c, t), and its gain is (exp f(c, c) - exp f(c, c')) / exp f(c, c). The effective context is the first c, in
steps of Δ, whose gain to c + Δ is below 1 %.

Each run starts at a multiple of Δ with an empty memory. So a token that stands o positions after a multiple (1 ≤ o ≤ Δ)
has losses with o, Δ + o, 2Δ + o … tokens of context, from the runs that start there, Δ earlier, 2Δ earlier …. In every
run, segments end at the same places of the text (multiples of L), so a token's losses differ only by the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike
from txl_runtime.listener import Listener, Silent
from txl_runtime.streaming.inputs import refusal
from txl_runtime.types import Ids

from txl_report.facts.plain import Missing
from txl_report.measuring.averages import Values
from txl_report.measuring.results import ContextMeasure
from txl_report.measuring.texts import checked_ids, fewer

if TYPE_CHECKING:
    from txl_runtime.model import Model
    from txl_runtime.streaming.stream import Stream

MOST_COMPARED = 8_192
"""Maximum number of tokens that are compared; a quarter for a large model (`fewer`)."""
FEWEST_COMPARED, FEWEST_BLOCKS = 1_000, 16
"""Minimum number of tokens, and of blocks of Δ tokens, for a result, so that a tenth of the tokens is a hundred."""
LENGTHS = 24
"""Approximate number of context lengths that are compared."""
SHARE, LEAST_GAIN = 0.1, 0.01
"""The paper's share of hardest tokens, and the relative gain below which more context counts as useless."""


def measure_context(model: Model, ids: ArrayLike, listener: Listener | None = None) -> ContextMeasure | Missing:
    """Measure the effective context; the same model and text always give the same numbers.

    Args:
        model: a model of any bundle.
        ids: int [T], the text as token ids, e.g. [100000]; only its beginning is used.
        listener: is told the number of runs that are done.

    Returns:
        The measurement, or the reason why none is possible.

    Raises:
        UsageError: the ids do not fit this model.
    """
    text_ids, manifest = checked_ids(model, ids), model.manifest
    step, lengths = lengths_of(model)
    fewest = max(FEWEST_BLOCKS, -(-FEWEST_COMPARED // step))
    needed = (lengths - 1 + fewest) * step + 1
    reason = refusal(manifest, "score")
    if not manifest.can.run_fewer:
        reason = "This model's sequences influence one another, so no run has a context of its own."
    elif not reason and len(text_ids) < needed:
        reason = f"A text of {needed:,} tokens or more is needed, this one has {len(text_ids):,}."
    if reason:
        return Missing(reason)
    blocks = min((len(text_ids) - 1) // step, lengths - 1 + max(fewest, fewer(manifest, MOST_COMPARED) // step))
    losses = losses_by_context(model, text_ids[: blocks * step + 1], step, lengths, listener or Silent())
    if not np.isfinite(losses).all():
        return Missing("Some losses are no finite numbers; see what `verify` says of this bundle.")
    gains = gains_of(losses)
    return ContextMeasure(
        given=len(text_ids),
        used=blocks * step + 1,
        compared=losses.shape[1],
        step=step,
        length=first_small(gains) * step,
        gains=tuple(gains.tolist()),
    )


def lengths_of(model: Model) -> tuple[int, int]:
    """Return (Δ, number of lengths to compare); Δ is a fraction or a multiple of the longest segment."""
    length, rows, manifest = model.segment_lengths[0], model.memory_length, model.manifest
    longest = 3 * (rows + length) if rows else max(256, 4 * length)
    longest = min(longest, manifest.reach or longest)
    sizes = [length * count for count in range(1, max(2, longest // length + 1))]
    while manifest.can.run_ragged and sizes[0] % 2 == 0:
        sizes.insert(0, sizes[0] // 2)
    step = min(sizes, key=lambda size: abs(np.log(size * LENGTHS / longest)))
    return step, max(2, -(-longest // step))


def losses_by_context(model: Model, ids: Ids, step: int, lengths: int, listener: Listener) -> Values:
    """Measure losses, float64 [lengths, compared tokens]; the shortest context comes first.

    For example, 5 lengths and 400 compared tokens give [5, 400].
    """
    targets, length = len(ids) - 1, model.segment_lengths[0]
    losses, starts = np.zeros((lengths, targets)), range(0, targets, step)
    stream = model.stream(min(model.batch_size, len(starts)))
    listener.stage("measuring the context", len(starts))
    # number of starts per segment; starts at the same offset in their segments run side by side
    stride = max(1, length // step)
    for alike in (starts[place::stride] for place in range(stride)):
        for index in range(0, len(alike), stream.batch_size):
            group = alike[index : index + stream.batch_size]
            for start, nll in zip(group, _run(stream, ids, group, lengths * step, length), strict=True):
                for context, first in enumerate(range(0, min(nll.size, targets - start), step)):
                    losses[context, start + first : start + first + step] = nll[first : first + step]
            listener.advance(len(group))
    return losses[:, (lengths - 1) * step :]


def _run(stream: Stream, ids: Ids, starts: Sequence[int], most: int, length: int) -> Values:
    """Measure losses [starts, positions] of runs side by side; zeros after the text's end."""
    positions = min(most, len(ids) - 1 - starts[0])
    tokens = np.zeros((stream.batch_size, positions + 1), np.int32)
    for row in range(stream.batch_size):
        start = starts[row] if row < len(starts) else starts[0]  # unused rows of the batch repeat the first run
        piece = ids[start : start + positions + 1]
        tokens[row, : len(piece)] = piece
    stream.reset()
    losses = np.empty((len(starts), positions))
    first, last = 0, min(length - starts[0] % length, positions)
    while first < positions:
        losses[:, first:last] = stream.score(tokens[:, first : last + 1])[: len(starts)]
        first, last = last, min(last + length, positions)
    return losses


def gains_of(losses: Values) -> Values:
    """Compute the gain from Δ more tokens for each length except the longest: [lengths, tokens] → [lengths - 1]."""
    count = max(1, round(SHARE * losses.shape[1]))
    hardest = np.argsort(-losses[:-1], axis=1, kind="stable")[:, :count]
    before, after = (np.take_along_axis(part, hardest, axis=1) for part in (losses[:-1], losses[1:]))
    gained: Values = 1 - np.exp((np.minimum(before, after) - before).mean(axis=1))
    return gained


def first_small(gains: Values) -> int:
    """Return the index of the first gain below `LEAST_GAIN`: 1 for [0.2, 0.005, 0]; if there is none, len(gains)."""
    small = np.flatnonzero(gains < LEAST_GAIN)
    return int(small[0]) if len(small) else len(gains)
