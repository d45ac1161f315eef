"""Drawing the next token, computing no more of the distribution than the draw needs.

Behind an adaptive softmax the head says log p of its own words and of the further clusters; what the words of cluster c
have is known only once its tail is computed: log p(word) = log p(c) + tail[word], so p(word) <= p(c). Hence:

* **Greedy**: clusters with p(c) below the best word known cannot hold a better one. Clusters are computed from the
  most probable on until none is left that could.
* **One draw at temperature 1, nothing cut off**: with u uniform in [0, total), the inverse of the cumulative
  distribution in vocabulary order falls on a head word or into a cluster, by the head alone, because the words of a
  cluster sum to p(c). Only that cluster's tail is computed, to place the rest of u in it.
* **One draw at another temperature T**: the weights p^(1/T) of a cluster's n words sum to something between p(c)^(1/T)
  and n^(1-1/T) p(c)^(1/T) (all on one word; spread evenly), so the total has bounds too, and so has the point at which
  u falls. Clusters are computed from the most probable on until both bounds of it fall on the same word.
* **top-k**: the k best are known as soon as k known words are above p(c) of every cluster that is not computed, at any
  temperature, because it keeps the order. **top-p**: as soon as the known words above every such p(c) reach the share p
  of the total, with as many words for either bound of it. Clusters are computed from the most probable on until so.

What is drawn is what the full distribution and the same random number give, to the rounding of sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from txl_runtime.errors import BackendError, UsageError
from txl_runtime.streaming.checks import is_whole
from txl_runtime.streaming.loop import Result
from txl_runtime.streaming.outputs import DrawCount, Output
from txl_runtime.streaming.parts import reaching

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Bools = NDArray[np.bool_]

FEW = 1024
"""So many words are sorted first, where a nucleus is sought; mostly it is within."""


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

    Attributes:
        temperature: as given.
        heat: the same as a program takes it, which knows float32 alone; 1 where the best word is all that is asked for.

    Raises:
        UsageError: an option is out of its range.
    """

    def __init__(
        self, temperature: float, top_k: int | None, top_p: float | None, seed: int | None, streams: int
    ) -> None:
        number = isinstance(temperature, int | float | np.number)
        if not number or not np.isfinite(temperature) or temperature < 0:
            raise UsageError(f"temperature is {temperature}, expected a number of at least 0; 0 is greedy")
        if top_k is not None and (not is_whole(top_k) or top_k < 1):
            raise UsageError(f"top_k is {top_k}, expected a whole number of at least 1, or None to keep every token")
        if top_p is not None and (not isinstance(top_p, int | float | np.number) or not 0 < top_p <= 1):
            raise UsageError(f"top_p is {top_p}, expected more than 0 and at most 1, or None to keep every token")
        if seed is not None and (not is_whole(seed) or seed < 0):
            raise UsageError(f"seed is {seed}, expected a whole number of at least 0, or None for a fresh one")
        self.temperature, self.top_k, self.top_p = float(temperature), top_k, top_p
        self.heat = min(self.temperature, float(np.finfo(np.float32).max)) or 1.0
        self._draws = [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(streams)]

    def draw_from(
        self, output: Output, result: Result, running: Bools, tokens: NDArray[np.int32], count: DrawCount
    ) -> None:
        """As `draw`, from the last positions of a result: without their features where its parts tell enough."""
        left, parts = running, result.parts()
        if parts is not None:
            left = running.copy()
            if self.temperature == 0:  # all at once: the usual case
                best, certain = parts.best(len(running))
                tokens[running & certain] = best[running & certain]
                left &= ~certain
            for stream in np.flatnonzero(left).tolist():
                with np.errstate(over="ignore", under="ignore"):  # as in `_draw`
                    found = parts.candidates(stream, self.temperature, self.top_k, self.top_p)
                if found is not None:
                    ids, weights = found
                    uniform = self._draws[stream].random() if self.temperature else 0.0
                    tokens[stream], left[stream] = ids[_place(np.cumsum(weights), uniform)], False
            count.tokens += int(running.sum() - left.sum())
        if left.any():
            self.draw(output, result.last(), left, tokens, count)

    def draw(
        self,
        output: Output,
        features: NDArray[np.float32],
        running: Bools,
        tokens: NDArray[np.int32],
        count: DrawCount,
    ) -> None:
        """The next token of each running stream, from its features [b, F], into tokens [b]; `count` goes on counting.

        Raises:
            BackendError: the log-probabilities hold NaN.
        """
        head, streams = output.head(features), np.flatnonzero(running)
        if self.temperature == 0 and len(output.clusters) == 1:  # all at once: the usual case, and the shortest
            best = head.argmax(axis=1)
            for stream in streams[np.isnan(head[streams, best[streams]])].tolist():  # NaN counts as the largest
                _refuse_nan(stream, head[stream])
            tokens[running] = best[running]
            count.tokens += len(streams)
            return
        for stream in streams.tolist():
            _refuse_nan(stream, head[stream])
            count.tokens += 1
            known = _Known(stream, output, features[stream : stream + 1], head[stream].astype(np.float64), count)
            tokens[stream] = self._draw(known, self._draws[stream])

    def _draw(self, known: _Known, draws: np.random.Generator) -> int:
        if self.temperature == 0:
            return self._best(known)
        uniform = draws.random()
        with np.errstate(over="ignore", under="ignore"):  # near temperature 0 all but the best go to 0, as they should
            if self.top_k is None and self.top_p is None:
                return self._by_cluster(known, uniform) if self.temperature == 1 else self._between(known, uniform)
            ids, weights = self._candidates(known)
        return int(ids[_place(np.cumsum(weights), uniform)])

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

    def _between(self, known: _Known, uniform: float) -> int:
        """One draw at a temperature, from bounds of the total."""
        while True:
            pending = known.pending()
            ids, values = known.gather()
            best = float(values.max())
            unknown = min((known.output.clusters[c][0] for c in pending), default=int(ids[-1]) + 1)
            cumulative = np.cumsum(self._weights(values[ids < unknown], best))
            if not pending:
                return int(ids[_place(cumulative, uniform)])
            low, high = np.searchsorted(cumulative, uniform * self._total(known, best), side="right").tolist()
            if low == high < len(cumulative):
                return int(ids[low])
            known.compute(pending[0])

    def _candidates(self, known: _Known) -> tuple[Ids, Floats]:
        """Token ids that may be drawn and their weights, best first; clusters are computed until they are known."""
        if self.top_k is None:
            return self._nucleus(known)
        ids, weights = self._k_best(known, self.top_k)
        count = len(ids) if self.top_p is None else reaching(weights, self.top_p * weights.sum())
        return ids[:count], weights[:count]

    def _k_best(self, known: _Known, count: int) -> tuple[Ids, Floats]:
        while True:
            pending = known.pending()
            ids, values = known.gather()
            if not pending or np.count_nonzero(values > known.cluster(pending[0])) >= count:
                order = _best_first(values, count)
                return ids[order], self._weights(values[order], values[order[0]])
            known.compute(pending[0])

    def _nucleus(self, known: _Known) -> tuple[Ids, Floats]:
        assert self.top_p is not None
        while True:
            pending = known.pending()
            ids, values = known.gather()
            best = float(values.max())
            asked = self.top_p * self._total(known, best)
            # No word that is not known can be among or before those above.
            above = values > known.cluster(pending[0]) if pending else np.ones(len(values), np.bool_)
            if not pending or self._weights(values[above], best).sum() >= asked[1]:
                for count in (FEW, len(values)):
                    order = _best_first(values, count)
                    weights = self._weights(values[order], best)
                    if weights.sum() >= asked[1]:
                        break
                low, high = (reaching(weights, mass) for mass in asked.tolist())
                if low == high or not pending:
                    return ids[order[:high]], weights[:high]
            known.compute(pending[0])

    def _weights(self, values: Floats, best: float) -> Floats:
        weights: Floats = np.exp((values - best) / self.temperature)
        return weights

    def _total(self, known: _Known, best: float) -> Floats:
        """The least and the most that all weights can sum to, relative to the best word known: [2]."""
        bounds = np.full(2, self._weights(known.words, best).sum())
        for cluster in range(1, len(known.output.clusters)):
            first, last = known.output.clusters[cluster]
            if cluster in known.tails:
                bounds += self._weights(known.cluster(cluster) + known.tails[cluster], best).sum()
            else:
                all_of_it, words = known.cluster(cluster) - best, np.log(last - first)
                on_one, evenly = all_of_it / self.temperature, (all_of_it - words) / self.temperature + words
                bounds += np.exp(sorted((on_one, evenly)))
        return bounds


def _best_first(values: Floats, count: int) -> Ids:
    """Indices of the `count` largest values, those that tie in their order; without sorting all the others."""
    among = np.arange(len(values))
    if count < len(values):
        among = np.flatnonzero(values >= np.partition(values, len(values) - count)[len(values) - count])
    order: Ids = among[np.argsort(-values[among], kind="stable")][:count]
    return order


def _place(cumulative: Floats, uniform: float) -> int:
    """Where a uniform number in [0, 1) falls among cumulative weights."""
    at = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(at, len(cumulative) - 1)


def _refuse_nan(stream: int, values: NDArray[Any]) -> None:
    if np.isnan(values).any():
        raise BackendError(f"stream {stream} produced NaN, expected log-probabilities; reset the stream")
