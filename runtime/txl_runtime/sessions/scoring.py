"""Log-probabilities of known tokens and of the k best tokens at their places, computed for a limited number of rows at
a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from txl_runtime.streaming.outputs import StreamSoftmax
from txl_runtime.streaming.sampling import best_first
from txl_runtime.types import Floats, Ids

CHUNK = 2**22
"""Maximum number of log-probabilities held at a time: 16 MiB of float32."""

Best = tuple[tuple[int, float], ...]
"""Best tokens of a position: (id, log-probability), the most probable first."""


def score_rows(output: StreamSoftmax, features: Floats, targets: Ids, top: int) -> tuple[Floats, Ids, Floats]:
    """Return log-probabilities of the tokens that follow t positions, and the k best tokens after each position.

    For example, features [3, 64] and `top` 2 give arrays [3], [3, 2] and [3, 2].

    Args:
        output: the softmax.
        features: the positions' feature rows, [t, F].
        targets: the token after each position, [t] or longer.
        top: number k of best tokens per position.

    Returns:
        Log-probabilities of the targets, [t]; ids and log-probabilities of the k best tokens, [t, k]. A row with NaN
        gives NaN; with k > 0, all rows of its chunk give NaN.
    """
    count, words = len(features), output.clusters[-1][1]
    logprobs = np.zeros(count, np.float32)
    ids, best = np.zeros((count, top), np.int32), np.zeros((count, top), np.float32)
    some = max(1, CHUNK // words)
    row = np.zeros((min(some, count) if top else 0, words), np.float32)
    for first in range(0, count, some):
        last = min(first + some, count)
        if not top:
            logprobs[first:last] = -output.nll(features[first:last], targets[first:last])
            continue
        values = row[: last - first]
        output.logprobs(features[first:last], values)
        logprobs[first:last] = values[np.arange(last - first), targets[first:last]]
        if np.isnan(values).any():  # NaN has no order, so no best tokens exist; the caller closes the session
            logprobs[first:last] = np.nan
            continue
        for place, value in enumerate(values, first):
            ids[place] = best_first(value, top)
            best[place] = value[ids[place]]
    return logprobs, ids, best


def best_of(output: StreamSoftmax, features: Floats, tokens: Ids, tops: Sequence[int]) -> list[tuple[float, Best]]:
    """Return (log-probability of its token, k best tokens) for each position; (NaN, ()) if its row holds NaN.

    For example, features [2, 64] give (-0.3, two best tokens) and (-2.1, two best tokens) for `tops` [2, 2].

    Args:
        output: the softmax.
        features: the positions' feature rows, [n, F].
        tokens: the token after each position, [n].
        tops: number k of best tokens for each position.
    """
    pairs: list[tuple[float, Best]] = []
    some = max(1, CHUNK // output.clusters[-1][1])
    for first in range(0, len(tops), some):
        values = np.zeros((len(features[first : first + some]), output.clusters[-1][1]), np.float32)
        output.logprobs(features[first : first + some], values)
        for row, token, top in zip(values, tokens[first:], tops[first:], strict=False):
            if np.isnan(row).any():
                pairs.append((float("nan"), ()))
                continue
            best = tuple((int(word), float(row[word])) for word in best_first(row, top)) if top else ()
            pairs.append((float(row[token]), best))
    return pairs
