"""How far the runtime is from the reference, in one chain of segments.

Compared are all columns of the vocabulary in every row that counts, after every segment, and the whole memory: after
every segment where that is cheap, else after every eighth and the last (`chains`). Nothing is sampled.

Each comparison of rows is one pass in float64 over arrays that are used again and again: with o the runtime's and t the
reference's log-probabilities and p = softmax(t), KL(p ‖ softmax(o)) = lse(o) - lse(t) - Σ p·(o - t), so two
exponentials per column do, and an unnormalised side is normalised on the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from txl_runtime.ladder import NEAR_TIE
from txl_runtime.streaming.stream import Stream

from txl_export.parity.oracle import Logprobs, ReferenceStreams
from txl_export.parity.report import Chain, ChainResult

CHUNK = 100_000
"""Log-probabilities compared at a time: they and what is computed of them fit into a core's share of the cache."""


class Distributions:
    """Compares log-probabilities of many positions, and adds divergence and agreement to a chain."""

    def __init__(self, chain: Chain, vocab_size: int) -> None:
        self._chain = chain
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
        self._chain.kl.extend(np.nan_to_num(divergence, nan=math.inf, posinf=math.inf).tolist())
        best = expected.argmax(axis=1)
        weight[every, best] = -1
        second = weight.argmax(axis=1)
        decided = expected[every, best] - expected[every, second] >= NEAR_TIE
        decided |= expected.shape[1] == 1
        self._chain.decided += int(decided.sum())
        self._chain.agreeing += int((best == found.argmax(axis=1))[decided].sum())
        return _or_infinite(largest), _or_infinite(total)


class ChainComparison:
    """Compares a chain of a Transformer-XL segment by segment, and adds what it finds to the chain's result."""

    def __init__(self, result: ChainResult, vocab_size: int) -> None:
        self._result, self._scale = result, 1.0
        self._distributions = Distributions(result, vocab_size)

    def segment(self, pairs: Iterable[tuple[Logprobs, Logprobs]]) -> None:
        """One segment's log-probabilities: pairs of expected and found rows, [n, V] each."""
        result, largest, total, count, values = self._result, 0.0, 0.0, 0, 0
        for expected, found in pairs:
            most, summed = self._distributions.compare(expected, found)
            largest, total = max(largest, most), total + summed
            count, values = count + len(expected), values + expected.size
        result.segments += 1
        result.positions += count
        result.rows.append(count)
        result.max_per_segment.append(largest)
        result.mean_logprobs.append(total / max(values, 1))
        result.max_logprobs = max(result.max_logprobs, largest)

    def memory(self, truth: ReferenceStreams, stream: Stream, form: str) -> None:
        """All of the memory, relative to the largest value of the reference so far, from 1 on."""
        expected = truth.memory(form)
        for name, found in stream.iter_memory():
            known, rows = next(expected)
            assert known == name
            self._scale = max(self._scale, float(np.abs(rows).max(initial=0)))
            largest = _or_infinite(float(np.abs(rows - found).max(initial=0)))
            self._result.max_memory = max(self._result.max_memory, largest / self._scale)


def _or_infinite(value: float) -> float:
    """NaN counts as infinitely far."""
    return math.inf if math.isnan(value) else value
