"""Draws from all log-probabilities at once, for tests of those that compute no more than they need."""

from __future__ import annotations

import numpy as np


def by_the_whole(values: np.ndarray, uniform: float, temperature: float, top_k: int | None, top_p: float | None) -> int:
    """Draw as a sampler that has all log-probabilities: plainly, in float64."""
    if temperature == 0:
        return int(values.argmax())
    weights = np.exp((values - values.max()) / temperature)
    order = np.arange(len(weights))
    if top_k is not None or top_p is not None:
        order = np.argsort(-weights, kind="stable")[:top_k]
    if top_p is not None:
        shares = weights[order] / weights[order].sum()
        order = order[: int((np.cumsum(shares) < top_p).sum()) + 1]
    cumulative = np.cumsum(weights[order])
    return int(order[np.searchsorted(cumulative, uniform * cumulative[-1], side="right")])


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """Return log_softmax of the last axis, float32."""
    return (scores - np.logaddexp.reduce(scores, axis=-1, keepdims=True)).astype(np.float32)
