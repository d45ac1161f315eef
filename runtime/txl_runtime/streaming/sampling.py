"""Drawing the next token while computing only the part of the distribution that the draw needs.

In an adaptive softmax the head has log p of its own words and of the further clusters. The words of cluster c are known
only once its tail is computed: log p(word) = log p(c) + tail[word], so p(word) <= p(c). Hence:

* **Greedy**: a cluster with p(c) below the best known word cannot hold a better word. Clusters are computed, the most
  probable first, until no cluster is left that could hold a better word.
* **One draw at temperature 1 without top-k or top-p**: u is uniform in [0, total). Only the head decides whether u
  falls on a head word or into a cluster, because the words of a cluster sum to p(c). Only the tail of this cluster is
  computed, to place the rest of u in it.
* **One draw at a temperature T other than 1**: the weights p^(1/T) of a cluster's n words sum to between p(c)^(1/T) and
  n^(1-1/T) p(c)^(1/T) (all on one word; spread evenly). So the total has two bounds, and so has the point at which u
  falls. Clusters are computed, the most probable first, until both bounds of that point fall on the same word.
* **top-k**: the k best words are known once k known words are above p(c) of every cluster that is not computed; a
  temperature does not change the order. **top-p**: the words to keep are known once the known words above every such
  p(c) reach the share p of the total, and both bounds of the total need the same number of words. Clusters are computed
  in the same order.

The drawn token is the token that the full distribution and the same random number give, except for rounding of sums.

A sampler with `datastore` or `adjust` computes every cluster. The tokens of the store's neighbours are mixed into the
row first; `adjust` is given the mixed row, and the token is drawn from the row that `adjust` returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from txl_runtime.errors import BackendError, TxlError, UsageError
from txl_runtime.streaming.adjusting import Adjust, Past, called
from txl_runtime.streaming.best_words import reaching
from txl_runtime.streaming.checks import check_listed, is_number, is_whole, shown
from txl_runtime.streaming.datastore import Datastore, mixed, searched
from txl_runtime.streaming.loop import Result
from txl_runtime.streaming.outputs import DrawCount, StreamSoftmax
from txl_runtime.types import Ids, Indices

Floats = NDArray[np.float64]
"""Log-probabilities or weights; float64, so that sums over a vocabulary are exact enough."""
Bools = NDArray[np.bool_]
"""Arrays with one bool for each sequence or word."""

FEW = 1024
"""Number of best words that are sorted first for top-p: mostly the words that top-p keeps are among them."""


@dataclass
class _Known:
    """The part of one row's distribution that is computed: the head, and the tails computed so far."""

    stream: int
    output: StreamSoftmax
    clusters: Sequence[tuple[int, int]]
    features: NDArray[np.float32]
    head: Floats
    count: DrawCount
    neighbours: tuple[Ids, Floats] | None = None
    tails: dict[int, Floats] = field(default_factory=dict)

    @property
    def words(self) -> Floats:
        """Log-probabilities of the head's own words."""
        return self.head[: self.clusters[0][1]]

    def cluster(self, cluster: int) -> float:
        """Return log p of a further cluster, from the head."""
        return float(self.head[self.clusters[0][1] + cluster - 1])

    def pending(self) -> list[int]:
        """Return the clusters whose tail is not computed yet, the most probable first."""
        rest = (c for c in range(1, len(self.clusters)) if c not in self.tails)
        return sorted(rest, key=lambda c: -self.cluster(c))

    def compute(self, cluster: int) -> Floats:
        """Return log p(word | cluster) of a cluster's words, computing its tail once."""
        if cluster not in self.tails:
            self.tails[cluster] = self.output.tail(self.features, cluster)[0].astype(np.float64)
            _refuse_nan(self.stream, self.tails[cluster])
            self.count.tails += 1
        return self.tails[cluster]

    def gather(self) -> tuple[Indices, Floats]:
        """Return ids and log-probabilities of all known words, in vocabulary order."""
        ids = [np.arange(len(self.words)), *(np.arange(*self.clusters[cluster]) for cluster in sorted(self.tails))]
        return np.concatenate(ids), self.values()

    def values(self) -> Floats:
        """Return log-probabilities of all known words, in vocabulary order."""
        tails = (self.cluster(cluster) + self.tails[cluster] for cluster in sorted(self.tails))
        return np.concatenate([self.words, *tails])


class Sampler:
    """A sampler of one sequence's tokens: it applies temperature, then top-k, then top-p, then draws one token.

    Each sampler has its own generator of random numbers, so a sequence's draws do not depend on other sequences.

    Args:
        temperature: divisor of the log-probabilities; 0 takes the most probable token.
        top_k: keep the k most probable tokens; None for all.
        top_p: keep the smallest set of most probable tokens whose probability reaches p (Holtzman et al. 2020).
        seed: seed of the random numbers; None for a random seed.
        stream: index of the sequence; samplers of one seed and different indices draw different random numbers.
        adjust: a function of the whole row, float64 [V], and of the sequence's tokens, int32 [n], that returns the row
            to draw from: see `adjusting.Adjust`. The function is applied before the temperature.
        datastore: a store whose neighbours are mixed in, before `adjust`: see `datastore.Datastore`.

    Attributes:
        temperature: the argument, as a float.
        heat: the temperature as a program reads it, within float32's range; 1 for a greedy sampler.
        datastore: the argument.
        whole: True if the whole row is read, because of `adjust` or `datastore`.
        plainly_greedy: True if the sampler takes the most probable token of the model's own, unadjusted row.

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
        adjust: Adjust | None = None,
        datastore: Datastore | None = None,
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
        self._adjust, self.datastore, self._past = adjust, datastore, Past()
        self.whole = adjust is not None or datastore is not None
        self.plainly_greedy = self.temperature == 0 and not self.whole

    def read(self, tokens: Ids) -> None:
        """Add tokens that were read before the next draw, int32 [n], for `adjust`; `draw` itself adds drawn tokens.

        For example, `read([5, 9])`.
        """
        if self._adjust is not None:
            self._past.add(tokens)

    def uniform(self) -> float:
        """Return the next random number in [0, 1); at temperature 0 return 0 without using a random number."""
        return self._draws.random() if self.temperature else 0.0

    def draw(self, known: _Known) -> int:
        """Return the next token, computing only the tails of `known` that the draw needs.

        Raises:
            BackendError: the log-probabilities hold NaN.
            UsageError: `adjust` failed or returned no row to draw from; no random number was used.
        """
        if not self.whole:
            return self._drawn(known)
        for cluster in known.pending():
            known.compute(cluster)
        row = known.values()
        if known.neighbours is not None:
            row = mixed(row, *known.neighbours)
        if self._adjust is not None:
            row = called(self._adjust, row, self._past.tokens())
        token = self._drawn(replace(known, clusters=((0, len(row)),), head=row, tails={}))
        self.read(np.array([token], np.int32))
        return token

    def _drawn(self, known: _Known) -> int:
        if self.temperature == 0:
            return self._best(known)
        uniform = self.uniform()
        # near temperature 0, all weights except the best underflow to 0
        with np.errstate(over="ignore", under="ignore"):
            if self.top_k is None and self.top_p is None:
                return self._by_cluster(known, uniform) if self.temperature == 1 else self._between(known, uniform)
            ids, weights = self._candidates(known)
        return int(ids[_place(np.cumsum(weights), uniform)])

    def _best(self, known: _Known) -> int:
        best = int(known.words.argmax())
        value = float(known.words[best])
        for cluster in known.pending():
            first = known.clusters[cluster][0]
            if (known.cluster(cluster), -first) > (value, -best):  # of equally probable words, the lowest id wins
                tail = known.compute(cluster)
                in_tail = int(tail.argmax())
                candidate = known.cluster(cluster) + float(tail[in_tail])
                if (candidate, -first) > (value, -best):
                    best, value = first + in_tail, candidate
        return best

    def _by_cluster(self, known: _Known, uniform: float) -> int:
        """Draw from the head; if the draw falls on a cluster, draw from that cluster's tail."""
        cumulative = np.cumsum(np.exp(known.head - known.head.max()))
        at = _place(cumulative, uniform)
        if at < len(known.words):
            return at
        cluster = at - len(known.words) + 1
        below, above = cumulative[at - 1], cumulative[at]
        inside = (uniform * cumulative[-1] - below) / (above - below)
        tail = known.compute(cluster)
        return known.clusters[cluster][0] + _place(np.cumsum(np.exp(tail)), inside)

    def _between(self, known: _Known, uniform: float) -> int:
        """Return a draw at a temperature other than 1, computing tails until the bounds of the total decide it."""
        while True:
            pending = known.pending()
            ids, values = known.gather()
            best = float(values.max())
            unknown = min((known.clusters[c][0] for c in pending), default=int(ids[-1]) + 1)
            cumulative = np.cumsum(self._weights(values[ids < unknown], best))
            if not pending:
                return int(ids[_place(cumulative, uniform)])
            low, high = np.searchsorted(cumulative, uniform * self._total(known, best), side="right").tolist()
            if low == high < len(cumulative):
                return int(ids[low])
            known.compute(pending[0])

    def _candidates(self, known: _Known) -> tuple[Indices, Floats]:
        """Return the token ids that may be drawn and their weights, best first, computing only the needed tails."""
        if self.top_k is None:
            return self._nucleus(known)
        ids, weights = self._k_best(known, self.top_k)
        count = len(ids) if self.top_p is None else reaching(weights, self.top_p * weights.sum())
        return ids[:count], weights[:count]

    def _k_best(self, known: _Known, count: int) -> tuple[Indices, Floats]:
        while True:
            pending = known.pending()
            ids, values = known.gather()
            if not pending or np.count_nonzero(values > known.cluster(pending[0])) >= count:
                order = best_first(values, count)
                return ids[order], self._weights(values[order], values[order[0]])
            known.compute(pending[0])

    def _nucleus(self, known: _Known) -> tuple[Indices, Floats]:
        assert self.top_p is not None
        while True:
            pending = known.pending()
            ids, values = known.gather()
            best = float(values.max())
            asked = self.top_p * self._total(known, best)
            # No word of a cluster whose tail is unknown can exceed p(cluster), so the words marked here are the best.
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
        """Return the lower and upper bound of the sum of all weights, [2]; the best known word has weight 1."""
        bounds = np.full(2, self._weights(known.words, best).sum())
        for cluster in range(1, len(known.clusters)):
            first, last = known.clusters[cluster]
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
    """Draw the next token of each running sequence into tokens [b], as `draw_from` does.

    With `running` [True, False], only `tokens[0]` changes.

    Raises:
        TxlError: sequences failed; the error of the failed sequence with the lowest index is raised.
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
) -> dict[int, TxlError]:
    """Draw as `draw` does, at the last positions of a result, and only from the best words if they suffice.

    The best words never suffice for a sampler with `adjust` or `datastore`, which reads the whole row. With samplers
    [one, None], only `tokens[0]` changes.
    """
    parts = result.parts()
    if parts is None:
        return draw(samplers, output, result.last(), tokens, count)
    left, failed = list(samplers), dict[int, TxlError]()
    live = [(row, sampler) for row, sampler in enumerate(samplers) if sampler is not None]
    if any(sampler.plainly_greedy for _, sampler in live):  # a shortcut for the usual case, in one NumPy call
        best, certain = parts.best(len(samplers))
        for row, sampler in live:
            if sampler.plainly_greedy and certain[row]:
                tokens[row], left[row] = best[row], None
    for row, sampler in live:
        if left[row] is None or sampler.whole:
            continue
        try:
            # near temperature 0, all weights except the best underflow to 0
            with np.errstate(over="ignore", under="ignore"):
                candidates = parts.candidates(row, sampler.temperature, sampler.top_k, sampler.top_p)
        except BackendError as error:
            failed[row], left[row] = error, None
            continue
        if candidates is not None:
            ids, weights = candidates
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
) -> dict[int, TxlError]:
    """Draw the next token of each sequence that has a sampler, with one call of the softmax's head.

    With samplers [one, None], only `tokens[0]` changes.

    Args:
        samplers: the sampler of each of b sequences; None for a sequence without a draw.
        output: the softmax.
        features: [b, F], the rows that the softmax reads.
        tokens: int32 [b], which receives the tokens.
        count: the counters to increase.

    Returns:
        Errors by index of sequence: its log-probabilities hold NaN, its `adjust` or datastore failed, or the engine
        failed only for this sequence.

    Raises:
        BackendError: the engine failed for all sequences.
    """
    head, failed = output.head(features), dict[int, TxlError]()
    live = [(row, sampler) for row, sampler in enumerate(samplers) if sampler is not None]
    count.tokens += len(live)
    if len(output.clusters) == 1 and any(sampler.plainly_greedy for _, sampler in live):
        best = head.argmax(axis=1)  # a shortcut for the usual case, in one NumPy call
        values = head[np.arange(len(best)), best]
        for row, sampler in live:
            if sampler.plainly_greedy:
                tokens[row] = best[row]
                if np.isnan(values[row]):  # argmax treats NaN as the largest value
                    failed[row] = _nan(row)
        live = [(row, sampler) for row, sampler in live if not sampler.plainly_greedy]
    neighbours = _searched(live, features, output, failed)
    for row, sampler in live:
        if row in failed:
            continue
        try:
            _refuse_nan(row, head[row])
            values = head[row].astype(np.float64)
            row_features, neighbour = features[row : row + 1], neighbours.get(row)
            known = _Known(row, output, output.clusters, row_features, values, count, neighbour)
            tokens[row] = sampler.draw(known)
        except TxlError as error:
            failed[row] = error
    return failed


def _searched(
    live: Sequence[tuple[int, Sampler]],
    features: NDArray[np.float32],
    output: StreamSoftmax,
    failed: dict[int, TxlError],
) -> dict[int, tuple[Ids, NDArray[np.float64]]]:
    """Return the neighbours' tokens and shares, [K] each, by row; sequences of one store are searched for together.

    The errors of stores are added to `failed`, for each of their sequences.
    """
    rows: dict[int, list[int]] = {}
    stores = {id(sampler.datastore): sampler.datastore for _, sampler in live if sampler.datastore is not None}
    for row, sampler in live:
        rows.setdefault(id(sampler.datastore), []).append(row)
    results = dict[int, tuple[Ids, NDArray[np.float64]]]()
    for key, store in stores.items():
        try:
            tokens, shares = searched(store, features[rows[key]], output)
            results |= zip(rows[key], zip(tokens, shares, strict=True), strict=True)
        except TxlError as error:
            failed |= dict.fromkeys(rows[key], error)
    return results


def _number(value: object) -> float:
    """Return a number as a float: infinity if it is too large, NaN if the value is not a number."""
    if not is_number(value):
        return np.nan
    try:
        return float(value)
    except OverflowError:
        return np.inf


def check_stop_tokens(stop_tokens: Iterable[int], vocab_size: int) -> frozenset[int]:
    """Return the ids that end a sequence; raise UsageError for anything but a list of ids."""
    return frozenset(check_listed(stop_tokens, vocab_size, "stop_tokens").tolist())


def best_first(values: NDArray[np.floating[Any]], count: int) -> Indices:
    """Return the indices of the `count` largest values, the lower index first if equal: [1, 0] of [2, 5, 2] for 2."""
    among = np.arange(len(values))
    if count < len(values):
        among = np.flatnonzero(values >= np.partition(values, len(values) - count)[len(values) - count])
    order: Indices = among[np.argsort(-values[among], kind="stable")][:count]
    return order


def _place(cumulative: Floats, uniform: float) -> int:
    """Return the index at which a uniform number in [0, 1) falls among cumulative weights: 1 for [1, 3, 4] and 0.5."""
    at = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(at, len(cumulative) - 1)


def _refuse_nan(stream: int, values: NDArray[Any]) -> None:
    if np.isnan(values).any():
        raise _nan(stream)


def _nan(stream: int) -> BackendError:
    return BackendError(f"stream {stream} produced NaN, expected log-probabilities; reset the stream")
