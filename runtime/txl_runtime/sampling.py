"""Drawing the next token, computing no more of the distribution than the draw needs.

Behind an adaptive softmax the head says log p of its own words and of the further clusters; what the words of cluster c
have is known only once its tail is computed: log p(word) = log p(c) + tail[word], so p(word) <= p(c). Hence:

* **Greedy**: clusters with p(c) below the best word known cannot hold a better one. Clusters are computed from the
  most probable on until none is left that could.
* **One draw at temperature 1, nothing cut off**: with u uniform in [0, total), the inverse of the cumulative
  distribution in vocabulary order falls on a head word or into a cluster, by the head alone, because the words of a
  cluster sum to p(c). Only that cluster's tail is computed, to place the rest of u in it.
* **top-k**: the k best are known as soon as k known words are above p(c) of every cluster that is not computed, at any
  temperature, because it keeps the order. **top-p** at temperature 1 (the total is the head's): as soon as the known
  words above every such p(c) reach the mass p. Clusters are computed from the most probable on until that is so.
* **Anything else** (a temperature with no top-k) needs a sum over all words: every tail is computed.

What is drawn is what the full distribution and the same random number give, to the rounding of sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from txl_runtime.errors import BackendError, UsageError
from txl_runtime.outputs import Output

__all__ = ["DrawCount", "Sampler"]

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


@dataclass
class DrawCount:
    """How much of the softmax draws needed.

    Attributes:
        tokens: drawn so far.
        tails: clusters beyond the head that had to be computed for them, in all.
    """

    tokens: int = 0
    tails: int = 0


@dataclass
class _Known:
    """What is known of one row's distribution: the head, and the clusters computed so far."""

    stream: int
    output: Output
    features: NDArray[np.float32]
    head: Floats
    count: DrawCount
    tails: dict[int, Floats] = field(default_factory=dict)

    @property
    def words(self) -> Floats:
        """Log-probabilities of the head's own words."""
        return self.head[: self.output.clusters[0][1]]

    def cluster(self, cluster: int) -> float:
        """Log p of a further cluster."""
        return float(self.head[self.output.clusters[0][1] + cluster - 1])

    def pending(self) -> list[int]:
        """Clusters not computed yet, the most probable first."""
        rest = (c for c in range(1, len(self.output.clusters)) if c not in self.tails)
        return sorted(rest, key=lambda c: -self.cluster(c))

    def compute(self, cluster: int) -> Floats:
        """Log-probabilities of a cluster's words, given the cluster."""
        if cluster not in self.tails:
            self.tails[cluster] = self.output.tail(self.features, cluster)[0].astype(np.float64)
            _refuse_nan(self.stream, self.tails[cluster])
            self.count.tails += 1
        return self.tails[cluster]

    def gather(self) -> tuple[Ids, Floats]:
        """Ids and log-probabilities of all known words, in vocabulary order."""
        ids, values = [np.arange(len(self.words))], [self.words]
        for cluster in sorted(self.tails):
            ids.append(np.arange(*self.output.clusters[cluster]))
            values.append(self.cluster(cluster) + self.tails[cluster])
        return np.concatenate(ids), np.concatenate(values)


class Sampler:
    """Temperature, then top-k, then top-p, then one draw; deterministic for a seed.

    Args:
        temperature: divides the log-probabilities; 0 takes the most probable token.
        top_k: keep the k most probable tokens.
        top_p: keep the smallest set of most probable tokens whose probability reaches p (Holtzman et al. 2020).
        seed: of the random draws; None for a fresh one.
        streams: b. Each stream has draws of its own, which do not depend on how many others there are.

    Raises:
        UsageError: an option is out of its range.
    """

    def __init__(
        self, temperature: float, top_k: int | None, top_p: float | None, seed: int | None, streams: int
    ) -> None:
        number = isinstance(temperature, int | float | np.number)
        if not number or not np.isfinite(temperature) or temperature < 0:
            raise UsageError(f"temperature is {temperature}, expected a number of at least 0; 0 is greedy")
        if top_k is not None and (not _whole(top_k) or top_k < 1):
            raise UsageError(f"top_k is {top_k}, expected a whole number of at least 1, or None to keep every token")
        if top_p is not None and (not isinstance(top_p, int | float | np.number) or not 0 < top_p <= 1):
            raise UsageError(f"top_p is {top_p}, expected more than 0 and at most 1, or None to keep every token")
        if seed is not None and (not _whole(seed) or seed < 0):
            raise UsageError(f"seed is {seed}, expected a whole number of at least 0, or None for a fresh one")
        self.temperature, self.top_k, self.top_p = float(temperature), top_k, top_p
        self._draws = [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(streams)]

    def draw(
        self,
        output: Output,
        features: NDArray[np.float32],
        running: NDArray[np.bool_],
        tokens: NDArray[np.int32],
        count: DrawCount,
    ) -> None:
        """The next token of each running stream, from its features [b, F], into tokens [b]; `count` goes on counting.

        Raises:
            BackendError: the log-probabilities hold NaN.
        """
        head = output.head(features)
        for stream in np.flatnonzero(running).tolist():
            _refuse_nan(stream, head[stream])
            count.tokens += 1
            if self.temperature == 0 and len(output.clusters) == 1:
                tokens[stream] = head[stream].argmax()  # as it is: the usual case, and the shortest
                continue
            known = _Known(stream, output, features[stream : stream + 1], head[stream].astype(np.float64), count)
            tokens[stream] = self._draw(known, self._draws[stream])

    def _draw(self, known: _Known, draws: np.random.Generator) -> int:
        if self.temperature == 0:
            return self._best(known)
        uncut = self.top_k is None and self.top_p is None
        if uncut and self.temperature == 1:
            return self._by_cluster(known, draws.random())
        total = None
        if self.top_k is not None or (self.top_p is not None and self.temperature == 1):
            total = self._compute_until_decided(known)
        else:
            for cluster in known.pending():
                known.compute(cluster)
        ids, values = known.gather()
        with np.errstate(over="ignore"):  # close to temperature 0 all but the best go to -inf, as they should
            ids, scores = self._candidates(ids, (values - values.max()) / self.temperature, total)
        cumulative = np.cumsum(np.exp(scores - scores.max()))
        return int(ids[_place(cumulative, draws.random())])

    def _best(self, known: _Known) -> int:
        best = int(known.words.argmax())
        value = float(known.words[best])
        for cluster in known.pending():
            first = known.output.clusters[cluster][0]
            if (known.cluster(cluster), -first) > (value, -best):  # of words that tie the first is the best
                tail = known.compute(cluster)
                found = int(tail.argmax())
                candidate = known.cluster(cluster) + float(tail[found])
                if (candidate, -first) > (value, -best):
                    best, value = first + found, candidate
        return best

    def _by_cluster(self, known: _Known, uniform: float) -> int:
        """One draw from the head, and one more within a cluster if that is what was drawn."""
        cumulative = np.cumsum(np.exp(known.head - known.head.max()))
        at = _place(cumulative, uniform)
        if at < len(known.words):
            return at
        cluster = at - len(known.words) + 1
        below, above = cumulative[at - 1], cumulative[at]
        inside = (uniform * cumulative[-1] - below) / (above - below)
        tail = known.compute(cluster)
        return known.output.clusters[cluster][0] + _place(np.cumsum(np.exp(tail)), inside)

    def _compute_until_decided(self, known: _Known) -> float | None:
        """Compute clusters until the candidates are known; the total of all weights, relative to the best known."""
        while True:
            pending = known.pending()
            _, values = known.gather()
            bound = known.cluster(pending[0]) if pending else -np.inf
            above = values[values > bound]  # no word that is not known can be among or before these
            total = float(np.exp(known.head - values.max()).sum())
            if self.top_k is not None:
                decided = len(above) >= self.top_k
            else:
                assert self.top_p is not None
                decided = bool(np.exp(above - values.max()).sum() >= self.top_p * total)
            if decided or not pending:
                return total
            known.compute(pending[0])

    def _candidates(self, ids: Ids, scores: Floats, total: float | None) -> tuple[Ids, Floats]:
        """Token ids and scores that may be drawn; best first where anything was cut."""
        if self.top_k is None and self.top_p is None:
            return ids, scores
        order = np.argsort(-scores, kind="stable")
        if self.top_k is not None:
            order = order[: self.top_k]
        if self.top_p is not None:
            weights = np.exp(scores[order] - scores[order[0]])
            before = np.cumsum(weights) - weights
            whole = total if total is not None and self.top_k is None else weights.sum()
            order = order[before < self.top_p * whole]
        return ids[order], scores[order]


def _place(cumulative: Floats, uniform: float) -> int:
    """Where a uniform number in [0, 1) falls among cumulative weights."""
    at = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(at, len(cumulative) - 1)


def _refuse_nan(stream: int, values: NDArray[Any]) -> None:
    if np.isnan(values).any():
        raise BackendError(f"stream {stream} produced NaN, expected log-probabilities; reset the stream")


def _whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
