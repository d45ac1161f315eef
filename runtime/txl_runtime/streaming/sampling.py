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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from txl_runtime.errors import BackendError, UsageError
from txl_runtime.streaming.best_words import reaching
from txl_runtime.streaming.checks import MOST_NAMED, is_whole, shown
from txl_runtime.streaming.loop import Result
from txl_runtime.streaming.outputs import DrawCount, StreamSoftmax

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Bools = NDArray[np.bool_]

FEW = 1024
"""So many words are sorted first, where a nucleus is sought; mostly it is within."""


@dataclass
class _Known:
    """What is known of one row's distribution: the head, and the clusters computed so far."""

    stream: int
    output: StreamSoftmax
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
    """How the tokens of one sequence are drawn: temperature, then top-k, then top-p, then one draw.

    The random numbers are a generator's of its own, so what a sequence is given depends on no other one.

    Args:
        temperature: divides the log-probabilities; 0 takes the most probable token.
        top_k: keep the k most probable tokens.
        top_p: keep the smallest set of most probable tokens whose probability reaches p (Holtzman et al. 2020).
        seed: of the random draws; None for a fresh one.
        stream: which of the sequences that have the seed in common; each has draws of its own.

    Attributes:
        temperature: as given.
        heat: the same as a program takes it, which knows float32 alone; 1 where the best word is all that is asked for.

    Raises:
        UsageError: an option is out of its range.
    """

    def __init__(
        self,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stream: int = 0,
    ) -> None:
        heat, share = _number(temperature), None if top_p is None else _number(top_p)
        if not 0 <= heat < np.inf:
            raise UsageError(f"temperature is {shown(temperature)}, expected a number of at least 0; 0 is greedy")
        if top_k is not None and (not is_whole(top_k) or top_k < 1):
            raise UsageError(
                f"top_k is {shown(top_k)}, expected a whole number of at least 1, or None to keep every token"
            )
        if share is not None and not 0 < share <= 1:
            raise UsageError(
                f"top_p is {shown(top_p)}, expected more than 0 and at most 1, or None to keep every token"
            )
        if seed is not None and (not is_whole(seed) or seed < 0):
            raise UsageError(f"seed is {shown(seed)}, expected a whole number of at least 0, or None for a fresh one")
        self.temperature, self.top_k, self.top_p = heat, None if top_k is None else int(top_k), share
        self.heat = min(self.temperature, float(np.finfo(np.float32).max)) or 1.0
        self._draws = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(stream,)))

    def uniform(self) -> float:
        """The next random number in [0, 1); 0, and none is used up, where the best word is all that is asked for."""
        return self._draws.random() if self.temperature else 0.0

    def draw(self, known: _Known) -> int:
        """The next token, from what is known of its distribution and what still has to be computed.

        Raises:
            BackendError: the log-probabilities hold NaN.
        """
        if self.temperature == 0:
            return self._best(known)
        uniform = self.uniform()
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
                order = best_first(values, count)
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
                    order = best_first(values, count)
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


def draw_all(
    samplers: Sequence[Sampler],
    running: Bools,
    output: StreamSoftmax,
    result: Result,
    tokens: NDArray[np.int32],
    count: DrawCount,
) -> None:
    """As `draw_from`, for the sequences that are running.

    Raises:
        BackendError: the first thing that went wrong.
    """
    live = [sampler if runs else None for sampler, runs in zip(samplers, running.tolist(), strict=True)]
    failed = draw_from(live, output, result, tokens, count)
    if failed:
        raise failed[min(failed)]


def draw_from(
    samplers: Sequence[Sampler | None],
    output: StreamSoftmax,
    result: Result,
    tokens: NDArray[np.int32],
    count: DrawCount,
) -> dict[int, BackendError]:
    """As `draw`, from the last positions of a result: without their features where its parts tell enough."""
    parts = result.parts()
    if parts is None:
        return draw(samplers, output, result.last(), tokens, count)
    left, failed = list(samplers), dict[int, BackendError]()
    live = [(row, sampler) for row, sampler in enumerate(samplers) if sampler is not None]
    if any(sampler.temperature == 0 for _, sampler in live):  # all at once: the usual case
        best, certain = parts.best(len(samplers))
        for row, sampler in live:
            if sampler.temperature == 0 and certain[row]:
                tokens[row], left[row] = best[row], None
    for row, sampler in live:
        if left[row] is None:
            continue
        try:
            with np.errstate(over="ignore", under="ignore"):  # as in `Sampler.draw`
                found = parts.candidates(row, sampler.temperature, sampler.top_k, sampler.top_p)
        except BackendError as error:
            failed[row], left[row] = error, None
            continue
        if found is not None:
            ids, weights = found
            tokens[row], left[row] = ids[_place(np.cumsum(weights), sampler.uniform())], None
    remain = [row for row, sampler in enumerate(left) if sampler is not None]
    count.tokens += len(live) - len(remain)
    if remain:
        failed.update(draw(left, output, result.last(), tokens, count))
    return failed


def draw(
    samplers: Sequence[Sampler | None],
    output: StreamSoftmax,
    features: NDArray[np.float32],
    tokens: NDArray[np.int32],
    count: DrawCount,
) -> dict[int, BackendError]:
    """The next token of each sequence that has a sampler, from its features, with one call of the softmax's head.

    Args:
        samplers: [b], None where nothing is drawn.
        output: the softmax.
        features: [b, F].
        tokens: [b], where the tokens go.
        count: goes on counting.

    Returns:
        What went wrong, by sequence: its log-probabilities hold NaN, or the engine failed for it alone.

    Raises:
        BackendError: the engine failed for all of them.
    """
    head, failed = output.head(features), dict[int, BackendError]()
    live = [(row, sampler) for row, sampler in enumerate(samplers) if sampler is not None]
    count.tokens += len(live)
    if len(output.clusters) == 1 and any(sampler.temperature == 0 for _, sampler in live):
        best = head.argmax(axis=1)  # all at once: the usual case, and the shortest
        values = head[np.arange(len(best)), best]
        for row, sampler in live:
            if sampler.temperature == 0:
                tokens[row] = best[row]
                if np.isnan(values[row]):  # NaN counts as the largest
                    failed[row] = _nan(row)
        live = [(row, sampler) for row, sampler in live if sampler.temperature > 0]
    for row, sampler in live:
        try:
            _refuse_nan(row, head[row])
            known = _Known(row, output, features[row : row + 1], head[row].astype(np.float64), count)
            tokens[row] = sampler.draw(known)
        except BackendError as error:
            failed[row] = error
    return failed


def _number(value: object) -> float:
    """A number as a float: infinite where it is too large for one, NaN where it is none."""
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        return np.nan
    try:
        return float(value)
    except OverflowError:
        return np.inf


def check_stop_tokens(stop_tokens: Iterable[int], vocab_size: int) -> frozenset[int]:
    """The ids that end a sequence."""
    try:
        found: tuple[Any, ...] = tuple(islice(stop_tokens, MOST_NAMED + 1))
    except Exception:  # no iterable, an array without an axis, or an object with an opinion of its own
        found = (None,)
    if len(found) > MOST_NAMED or not all(is_whole(token) and 0 <= token < vocab_size for token in found):
        raise UsageError(f"stop_tokens is {shown(stop_tokens)}, expected a list of ids, 0 … {vocab_size - 1} each")
    return frozenset(int(token) for token in found)


def best_first(values: NDArray[np.floating[Any]], count: int) -> Ids:
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
        raise _nan(stream)


def _nan(stream: int) -> BackendError:
    return BackendError(f"stream {stream} produced NaN, expected log-probabilities; reset the stream")
