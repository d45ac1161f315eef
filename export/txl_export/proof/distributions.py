"""Computes errors and KL divergence of log-probabilities against a reference's, over many positions.

Rows are compared in float64, in reused buffers. With log-probabilities o of the runtime and t of the reference, and p =
softmax(t), KL(p ‖ softmax(o)) = lse(o) - lse(t) - Σ p·(o - t). This takes two exponentials per column, and neither side
has to be normalised.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from txl_runtime.ladder import limit_of

from txl_export.proof.comparing import ChainErrors, TensorErrors, or_infinite
from txl_export.proof.decades import counts_of

Logprobs: TypeAlias = NDArray[np.floating]

CHUNK = 100_000
"""Number of log-probabilities compared at a time: 3 float64 buffers of 0.8 MB fit into a core's share of the cache."""


class Distributions:
    """Compares the log-probabilities of two sides, and adds errors, divergence and agreement to the sums of a chain."""

    def __init__(self, chain: ChainErrors, errors: TensorErrors, vocab_size: int) -> None:
        self._chain, self._errors = chain, errors
        rows = max(1, CHUNK // vocab_size)
        self._other, self._difference, self._weight = (np.empty((rows, vocab_size)) for _ in range(3))

    def compare(self, expected: Logprobs, found: Logprobs) -> None:
        """Compare rows [n, V] of both sides; an error of NaN counts as infinite. For example, two arrays [10, 256]."""
        at_a_time = len(self._other)
        for first in range(0, len(expected), at_a_time):
            rows = slice(first, first + at_a_time)
            self._some(expected[rows], found[rows])

    def _some(self, expected: Logprobs, found: Logprobs) -> None:
        count, every, errors = len(expected), np.arange(len(expected)), self._errors
        other, difference, weight = (room[:count] for room in (self._other, self._difference, self._weight))
        with np.errstate(all="ignore"):  # NaN and infinities are judged below
            np.copyto(other, found)
            np.subtract(other, expected, out=difference)
            if math.isinf(float(expected.min())):  # both sides are -inf for a token that cannot come: the error is 0
                difference[other == expected] = 0
            np.exp(expected, out=weight, dtype=np.float64)  # in float32 the divergence of equal arrays would not be 0
            size = weight.sum(axis=1)
            first_order = np.einsum("ij,ij->i", weight, difference) / size
            np.exp(other, out=other)
            divergence = np.log(other.sum(axis=1)) - np.log(size) - first_order
            np.abs(difference, out=difference)
            usual = (
                expected
                if float(expected.min()) > -errors.mask
                else _relative(expected, found, difference, errors.mask)
            )
            largest, total = or_infinite(float(difference.max())), or_infinite(float(difference.sum()))
        errors.decades += counts_of(difference, largest=largest)
        errors.take(total, largest, difference.size)
        errors.usual.count += usual.size
        errors.usual.summed += float(usual.sum())
        errors.usual.of_squares += float(np.einsum("...i,...i->...", usual, usual).sum())
        self._chain.kl.extend(np.nan_to_num(divergence, nan=math.inf, posinf=math.inf).tolist())
        best = expected.argmax(axis=1)
        weight[every, best] = -1
        second = weight.argmax(axis=1)
        decided = expected[every, best] - expected[every, second] >= limit_of("near tie")
        decided |= expected.shape[1] == 1
        self._chain.chain.decided += int(decided.sum())
        self._chain.chain.agreeing += int((best == found.argmax(axis=1))[decided].sum())
        self._chain.ranks.add(best, expected, found)


def _relative(expected: Logprobs, found: Logprobs, difference: Logprobs, mask: float) -> Logprobs:
    """Divide errors of values that mean "never" (-1e4) by these values; return the other expected values."""
    never = np.abs(expected) >= mask
    exact = expected[never]
    difference[never] = np.where(exact == found[never], 0, difference[never] / np.abs(exact))
    return expected[np.isfinite(expected) & ~never]
