"""From losses at every context length to the effective context, by the rule of Dai et al. 2019 (appendix C).

Of a group of models, here of one, b(c, t) is the smallest loss of token t with a context of c tokens. Of two lengths
c < c', a model's relative loss f(c, c') is the mean of min(b(c, t), l(c', t)) over the share r of tokens with the
largest b(c, t), and its gain is (exp f(c, c) - exp f(c, c')) / exp f(c, c). The effective context is the first c, in
steps of Δ, whose gain to c + Δ is below 1 %.

The smaller of two losses counts, so losses that merely differ count as a gain. The same rule without the minimum, the
plain gain, has no such lean; it is told beside.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from txl_report.measuring.averages import BLOCK, Values
from txl_report.measuring.results import ContextGain, EffectiveContext

SHARES = (0.1, 0.5, 1.0)
"""r: of the paper's tables."""
LEAST_GAIN = 0.01
DRAWS = 200
"""Of the text's blocks, for the interval."""


def effective_contexts(losses: Values, step: int, shares: tuple[float, ...] = SHARES) -> tuple[EffectiveContext, ...]:
    """The effective context for each share of the tokens.

    Args:
        losses: float64 [lengths, tokens]: of each token with contexts that grow by `step`, shortest first; tokens in
            the order of the text.
        step: Δ, at most as many tokens as there are.
        shares: of the tokens that count, the hardest ones.
    """
    lengths, tokens = losses.shape
    orders = np.argsort(-losses[:-1], axis=1, kind="stable")
    block = step * -(-BLOCK // step)
    block_of = np.minimum(np.arange(tokens) // block, max(1, tokens // block) - 1)  # what remains goes to the last one
    blocks = int(block_of[-1]) + 1
    found = list(_gains(losses, orders, np.ones(tokens, np.int64), shares))
    draws = np.random.default_rng(0)
    drawn = np.empty((DRAWS, len(shares)), np.int64)
    for draw in drawn:
        weights = np.bincount(draws.integers(0, blocks, blocks), minlength=blocks)[block_of]
        draw[:] = [_first_small(gains) for _, gains, _ in _gains(losses, orders, weights, shares)]
    low, high = (np.percentile(drawn, share, axis=0, method=way) for share, way in ((5, "lower"), (95, "higher")))  # type: ignore[call-overload]
    return tuple(
        EffectiveContext(
            share=share,
            count=count,
            length=(first := _first_small(gains)) * step,
            at_least=first == lengths - 1,
            low=int(low[index]) * step,
            high=int(high[index]) * step,
            high_at_least=int(high[index]) == lengths - 1,
            plain_length=(plain_first := _first_small(plain)) * step,
            plain_at_least=plain_first == lengths - 1,
            gains=tuple(
                ContextGain(index * step, float(gain), float(own))
                for index, (gain, own) in enumerate(zip(gains, plain, strict=True))
            ),
        )
        for index, (share, (count, gains, plain)) in enumerate(zip(shares, found, strict=True))
    )


def _gains(
    losses: Values, orders: NDArray[np.int64], weights: NDArray[np.int64], shares: tuple[float, ...]
) -> Iterator[tuple[int, Values, Values]]:
    """For each share: how many tokens count, the gains [lengths - 1] and the plain ones.

    Args:
        losses: float64 [lengths, tokens].
        orders: [lengths - 1, tokens]: the tokens, hardest first.
        weights: [tokens]: how often each token counts.
        shares: of all of them.
    """
    counts = [max(1, round(share * int(weights.sum()))) for share in shares]
    means = np.empty((len(orders), 3, len(shares)))
    for row, order, short, long in zip(means, orders, losses[:-1], losses[1:], strict=True):
        weight, before, after = weights[order], short[order], long[order]
        so_far = np.cumsum(weight)
        ends = np.searchsorted(so_far, counts)
        for mean, values in zip(row, (before, np.minimum(before, after), after), strict=True):
            mean[:] = (np.cumsum(weight * values)[ends] - (so_far[ends] - counts) * values[ends]) / counts
    gains = 1 - np.exp(means[:, 1:] - means[:, :1])
    return ((count, gains[:, 0, index], gains[:, 1, index]) for index, count in enumerate(counts))


def _first_small(gains: Values) -> int:
    """The first length whose gain is small; the last one where none is."""
    small = np.flatnonzero(gains < LEAST_GAIN)
    return int(small[0]) if len(small) else len(gains)
