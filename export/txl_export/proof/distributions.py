"""How far log-probabilities of many positions are from those of a reference.

Each comparison of rows is one pass in float64 over arrays that are used again and again: with o the runtime's and t the
reference's log-probabilities and p = softmax(t), KL(p ‖ softmax(o)) = lse(o) - lse(t) - Σ p·(o - t), so two
exponentials per column do, and an unnormalised side is normalised on the way.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from txl_runtime.ladder import NEAR_TIE

from txl_export.proof.decades import Decades
from txl_export.proof.parity import Chain

Logprobs: TypeAlias = NDArray[np.floating]

CHUNK = 100_000
"""Log-probabilities compared at a time: they and what is computed of them fit into a core's share of the cache."""


class Distributions:
    """Compares log-probabilities of many positions, and adds divergence and agreement to a chain.

    `decades` counts sizes of |Δ|, where nobody else does.
    """

    def __init__(self, chain: Chain, vocab_size: int, decades: Decades | None = None) -> None:
        self._chain, self._decades = chain, decades
        rows = max(1, CHUNK // vocab_size)
        self._other, self._difference, self._weight = (np.empty((rows, vocab_size)) for _ in range(3))

    def compare(self, expected: Logprobs, found: Logprobs) -> tuple[float, float]:
        """Largest and summed |Δ| of rows [n, V]; NaN counts as infinitely far."""
        largest, total, at_a_time = 0.0, 0.0, len(self._other)
        for first in range(0, len(expected), at_a_time):
            rows = slice(first, first + at_a_time)
            most, summed = self._some(expected[rows], found[rows])
            largest, total = max(largest, most), total + summed
        return largest, total

    def _some(self, expected: Logprobs, found: Logprobs) -> tuple[float, float]:
        count, every = len(expected), np.arange(len(expected))
        other, difference, weight = (room[:count] for room in (self._other, self._difference, self._weight))
        with np.errstate(all="ignore"):  # NaN and infinities are judged below
            np.copyto(other, found)
            np.subtract(other, expected, out=difference)
            np.exp(expected, out=weight)
            size = weight.sum(axis=1)
            first_order = np.einsum("ij,ij->i", weight, difference) / size
            np.exp(other, out=other)
            divergence = np.log(other.sum(axis=1)) - np.log(size) - first_order
            np.abs(difference, out=difference)
            largest, total = float(difference.max()), float(difference.sum())
        if self._decades is not None:
            self._decades.add(difference, largest)
        self._chain.kl.extend(np.nan_to_num(divergence, nan=math.inf, posinf=math.inf).tolist())
        best = expected.argmax(axis=1)
        weight[every, best] = -1
        second = weight.argmax(axis=1)
        decided = expected[every, best] - expected[every, second] >= NEAR_TIE
        decided |= expected.shape[1] == 1
        self._chain.decided += int(decided.sum())
        self._chain.agreeing += int((best == found.argmax(axis=1))[decided].sum())
        self._chain.ranks.add(best, expected, found)
        return or_infinite(largest), or_infinite(total)


def or_infinite(value: float) -> float:
    """NaN counts as infinitely far."""
    return math.inf if math.isnan(value) else value
