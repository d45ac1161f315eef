"""Drawing the next token from log-probabilities."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from txl_runtime.errors import BackendError, UsageError

__all__ = ["Sampler"]


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

    def draw(self, stream: int, logprobs: NDArray[np.float32]) -> int:
        """The next token of one stream, from its log-probabilities [V].

        Raises:
            BackendError: the log-probabilities hold NaN.
        """
        if np.isnan(logprobs).any():
            raise BackendError(f"stream {stream} produced NaN, expected log-probabilities; reset the stream")
        if self.temperature == 0:
            return int(logprobs.argmax())
        below_best = logprobs.astype(np.float64) - float(logprobs.max())
        with np.errstate(over="ignore"):  # close to temperature 0 all but the best go to -inf, as they should
            tokens, scores = self._candidates(below_best / self.temperature)
        weights = np.exp(scores - scores.max())
        cumulative = np.cumsum(weights)
        at = np.searchsorted(cumulative, self._draws[stream].random() * cumulative[-1], side="right")
        return int(tokens[min(int(at), len(tokens) - 1)])

    def _candidates(self, scores: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Token ids and scores that may be drawn; best first where anything was cut."""
        if self.top_k is None and self.top_p is None:
            return np.arange(scores.size), scores
        order = np.argsort(-scores, kind="stable")
        if self.top_k is not None:
            order = order[: self.top_k]
        if self.top_p is not None:
            weights = np.exp(scores[order] - scores[order[0]])
            before = np.cumsum(weights) - weights
            order = order[before < self.top_p * weights.sum()]
        return order, scores[order]


def _whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
