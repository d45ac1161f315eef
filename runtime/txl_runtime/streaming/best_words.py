"""A draw from the best words of each part of a softmax, which mostly needs no row of all log-probabilities.

A program "next" returns the K best words of each part, the best first (see `txl_engines.composing`). In a part with
more than K words, no other word exceeds the last returned value. So the returned words above the largest of these last
values are the best of the whole vocabulary, in a known order, and a draw among them gives the same word as the row:

* **Greedy** and **top-k** need the best word, or the k best.
* **top-p** needs the words whose weights reach the share p of the total, the sum of the parts' sums. The device
  computed these sums in float32, so if a relative error of `CLOSE` could change the choice, the row has to decide.

`BestWords` returns None if the returned words do not suffice, or for a draw from the whole vocabulary: both need the
row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isnan

import numpy as np
from numpy.typing import NDArray

from txl_runtime.errors import BackendError
from txl_runtime.types import Array, Floats, Ids

CLOSE = 1e-5
"""Largest relative error of the total of the weights, which a device adds up in float32."""

Weighted = tuple[Ids, NDArray[np.float64]]
"""Token ids that may be drawn and their weights, (ids [n], weights [n]), the most probable first."""


class BestWords:
    """The result of a program "next" for b sequences: the K best words of each part of the softmax.

    Args:
        clusters: token ids [first, last) of each part: the head's words, then each tail's words.
        given: the program's outputs by name: "<part>.ids" and "<part>.values" [b, K], "sums" [b, parts], "clusters" [b,
            tails]. A device may fill them after the construction, before the first method is called.
    """

    def __init__(self, clusters: Sequence[tuple[int, int]], given: Mapping[str, Array]) -> None:
        names = ("head", *(f"tail.{cluster}" for cluster in range(1, len(clusters))))
        self._ids, self._values = ([given[f"{name}.{what}"] for name in names] for what in ("ids", "values"))
        self._sums, self._offsets, self._clusters = given["sums"], given.get("clusters"), clusters
        self._cut = [ids.shape[1] < last - first for ids, (first, last) in zip(self._ids, clusters, strict=True)]

    def best(self, b: int) -> tuple[Ids, NDArray[np.bool_]]:
        """Return each sequence's best word [b], and whether it is certain [b]: False if a second word of its part is
        equally good.

        For example, two sequences give ([17, 4], [True, False]).
        """
        firsts, seconds = (
            np.array([values[:b, min(at, values.shape[1] - 1)] for values in self._values]) for at in (0, 1)
        )  # both arrays have the shape [parts, b]
        if self._offsets is not None:
            firsts[1:] += self._offsets[:b].T
            seconds[1:] += self._offsets[:b].T
        ids, rows = np.array([ids[:b, 0] for ids in self._ids]), np.arange(b)
        part = firsts.argmax(axis=0)  # of equal parts argmax takes the first, as in the whole row
        sound = self._sums[:b].sum(axis=1) > 0  # `sound` is also False if the sum is NaN
        return ids[part, rows], sound & (firsts[part, rows] > seconds[part, rows])

    def candidates(self, stream: int, temperature: float, top_k: int | None, top_p: float | None) -> Weighted | None:
        """Return the words that may be drawn for a sequence, as `Sampler` finds them in a row; None if a row is needed.

        For example, `top_k` 2 gives ([17, 4], [0.7, 0.3]).

        Raises:
            BackendError: the log-probabilities hold NaN.
        """
        if isnan(sum(self._sums[stream].tolist())):
            raise BackendError(f"stream {stream} produced NaN, expected log-probabilities; reset the stream")
        if temperature > 0 and top_k is None and top_p is None:
            return None
        # Add in float32, as the program does, so that words that tie in the whole row tie here.
        parts = [values[stream] for values in self._values]
        if self._offsets is not None:
            parts[1:] = [part + offset for part, offset in zip(parts[1:], self._offsets[stream], strict=True)]
        bound = max((part[-1] for part, cut in zip(parts, self._cut, strict=True) if cut), default=-np.inf)
        values, ids = np.concatenate(parts), np.concatenate([ids[stream] for ids in self._ids])
        best = values.max()
        if best <= bound:
            return None
        if temperature == 0:
            return ids[values == best].min(keepdims=True), np.ones(1)
        ids, known = ids[values > bound], values[values > bound].astype(np.float64)
        if top_k is not None and len(ids) < top_k and any(self._cut):
            return None
        order = np.lexsort((ids, -known))[:top_k]
        ids, weights = ids[order], np.exp((known[order] - known[order[0]]) / temperature)
        if top_p is None:
            return ids, weights
        if top_k is not None:
            count = reaching(weights, top_p * weights.sum())
            return ids[:count], weights[:count]
        below = np.array([part[0] for part in parts], np.float64) - float(best)
        asked = top_p * (np.exp(below / temperature) * self._sums[stream]).sum()
        if weights.sum() < asked * (1 + CLOSE):
            return None
        low, high = (reaching(weights, asked * (1 + error)) for error in (-CLOSE, CLOSE))
        return (ids[:low], weights[:low]) if low == high else None

    def against(self, row: Floats, temperature: float) -> Iterator[tuple[Floats, Floats]]:
        """Yield pairs (result, expected from the whole row [b, V]) for each part: values, values at the ids, logs of
        sums.

        For example, with b 2 and K 8, the ids of each part are [2, 8].
        """
        b = len(row)
        for part, (first, last) in enumerate(self._clusters):
            ids, values = self._ids[part][:b], self._values[part][:b]
            if part and self._offsets is not None:
                values = values + self._offsets[:b, part - 1, None]
            best = -np.sort(-row[:, first:last], axis=1)[:, : ids.shape[1]]
            yield values, best
            yield row[np.arange(b)[:, None], ids.clip(first, last - 1)], best
            sums = np.exp((row[:, first:last] - best[:, :1]) / temperature).sum(axis=1)
            yield np.log(self._sums[:b, part]), np.log(sums)


def reaching(weights: NDArray[np.float64], mass: float) -> int:
    """Return the number of leading weights that add up to at least `mass`: 2 for [0.5, 0.3, 0.2] and 0.7."""
    return int((np.cumsum(weights) - weights < mass).sum())
