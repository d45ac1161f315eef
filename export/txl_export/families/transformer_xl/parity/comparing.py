"""How far the runtime is from the reference, in one chain of segments of a Transformer-XL.

Compared are all columns of the vocabulary in every row that counts, after every segment, and the whole memory: after
every segment where that is cheap, else after every eighth and the last (`chains`). Nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from txl_runtime.streaming.stream import Stream

from txl_export.families.transformer_xl.parity.oracle import ReferenceStreams
from txl_export.proof.distributions import Distributions, Logprobs, or_infinite
from txl_export.proof.parity import ChainResult


class ChainComparison:
    """Compares a chain of a Transformer-XL segment by segment, and adds what it finds to the chain's result."""

    def __init__(self, result: ChainResult, vocab_size: int) -> None:
        self._result, self._scale = result, 1.0
        self._distributions = Distributions(result, vocab_size, result.errors)

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
            largest = or_infinite(float(np.abs(rows - found).max(initial=0)))
            self._result.max_memory = max(self._result.max_memory, largest / self._scale)
