"""The protocol of a store of read positions, which is searched at each prediction, and the mixture of its answer with
the model's distribution.

The application brings the store and the search: a stream only calls `Datastore.shares`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from txl_runtime.errors import UsageError
from txl_runtime.streaming.checks import ids_fit, shown
from txl_runtime.streaming.outputs import StreamSoftmax, WholeSoftmax
from txl_runtime.types import Array, Floats, Ids

Shares = NDArray[np.float64]
"""Shares of the probability, float64 [n, K]: each goes to one neighbour's token."""
Entropies = Callable[[], NDArray[np.float64]]
"""A function that returns the entropy of the model's distribution at each position, float64 [n], in nats."""
ROWS = 16
"""Rows of log-probabilities that are computed at a time for entropies: 16 MB for 267,735 words."""


class Datastore(Protocol):
    """A store of positions that were read: at each, the features that entered the softmax, and the next token."""

    def shares(self, features: Floats, entropies: Entropies) -> tuple[Ids, Shares]:
        """Return neighbours' tokens, int32 [n, K], and their shares, float64 [n, K], for features float32 [n, F].

        The neighbours are the stored positions whose features are near. A store that weighs each position on its own
        may call `entropies`, which computes all words' log-probabilities. Tokens may repeat, and their shares then add
        up: tokens [[5, 5, 9]] with shares [[0.1, 0.1, 0.05]] give token 5 a fifth of the probability. The shares of a
        position add up to less than 1, and the model's distribution gets the difference. If all shares are 0, the
        model's distribution stays as it is, to the bit.
        """


def check_datastore(datastore: object, output: object) -> None:
    """Check that an object can be searched, and that a stream has features to search with.

    Args:
        output: the softmax of the stream's loop.

    Raises:
        UsageError: the object has no search, or the stream's programs return only log-probabilities.
    """
    if not callable(getattr(datastore, "shares", None)):
        raise UsageError(f"datastore is {shown(datastore)}, expected one that was opened; open the folder first")
    check_features("datastore", output)


def searched(datastore: Datastore, features: Floats, output: StreamSoftmax) -> tuple[Ids, Shares]:
    """Search a store; return checked tokens int32 [n, K] and shares float64 [n, K], as `Datastore.shares` describes
    them.

    For example, features [3, 64] and K 8 give tokens [3, 8] and shares [3, 8].

    Args:
        features: rows that enter the softmax `output`, float32 [n, F].

    Raises:
        UsageError: the store returned arrays of a different shape or dtype, or shares that are no shares.
    """
    vocab_size = output.clusters[-1][1]
    neighbours = datastore.shares(features, partial(entropies, output, features))
    try:
        tokens, shares = map(np.asarray, neighbours)
    except (TypeError, ValueError):
        raise UsageError(
            f"a datastore returned {shown(neighbours)}, expected tokens and shares; mend its `shares`"
        ) from None
    if tokens.dtype.kind not in "iu" or shares.dtype != np.float64:
        wrong = f"tokens of {tokens.dtype} and shares of {shares.dtype}, expected whole numbers and float64"
    elif tokens.ndim != 2 or len(tokens) != len(features) or tokens.shape != shares.shape:
        wrong = f"shapes {list(tokens.shape)} and {list(shares.shape)}, expected [{len(features)}, K] for both"
    elif not ids_fit(tokens, vocab_size):
        wrong = f"tokens {tokens.min()} … {tokens.max()}, expected ids in 0 … {vocab_size - 1}"
    elif not (shares >= 0).all() or not (shares.sum(axis=1) < 1).all():
        wrong = "shares that are negative or NaN, or add up to 1 or more, expected a sum below 1 at each position"
    else:
        return tokens, shares
    raise UsageError(f"a datastore returned {wrong}; mend its `shares`")


def entropies(output: StreamSoftmax, features: Floats) -> NDArray[np.float64]:
    """Return the entropy of the whole softmax after each of n feature rows [n, F], float64 [n], in nats.

    For example, two words that are equally likely have the entropy log 2 = 0.69.
    """
    rows, entropy = np.empty((ROWS, output.clusters[-1][1]), np.float32), np.empty(len(features))
    for first in range(0, len(features), ROWS):
        some = features[first : first + ROWS]
        logprobs = rows[: len(some)]
        output.logprobs(some, logprobs)
        entropy[first : first + ROWS] = -(np.exp(logprobs) * np.maximum(logprobs, -1e4)).sum(axis=1, dtype=np.float64)
    return entropy


def check_features(what: str, output: object) -> None:
    """Raise UsageError if a softmax reads no features, because its programs return log-probabilities."""
    if isinstance(output, WholeSoftmax):
        raise UsageError(
            f"{what}: this model's programs return log-probabilities alone, expected the rows that enter the softmax; "
            "load with update='ring' a bundle that has one"
        )


def mixed(row: Shares, tokens: Array, shares: Shares) -> Shares:
    """Return log(shares by token + (1 - their sum) · exp(row)), float64 [V].

    For example, two words of probability 0.5 each and a share 0.2 for token 0 give log [0.6, 0.4].

    Args:
        row: natural log-probabilities, float64 [V].
        tokens, shares: neighbours' tokens [K], and shares [K] that add up to less than 1.
    """
    ids, at = np.unique(tokens, return_inverse=True)
    result: Shares = row + np.log1p(-shares.sum())
    with np.errstate(divide="ignore"):  # log 0 is -inf: the token keeps what the model gives it
        result[ids] = np.logaddexp(result[ids], np.log(np.bincount(at, shares, len(ids))))
    return result


def mixed_nll(nll: Floats, targets: Ids, tokens: Ids, shares: Shares) -> Floats:
    """Return the negative log-likelihoods of targets [n] after the mixture, float32 [n], from the model's own [n].

    For example, a target of probability 0.5 whose token has a share 0.2 gets -log(0.2 + 0.8 · 0.5) = 0.51.

    Args:
        tokens, shares: neighbours' tokens and shares, [n, K].
    """
    hits = np.where(tokens == targets[:, None], shares, 0.0).sum(axis=1)
    with np.errstate(divide="ignore"):  # the log of 0 is -inf, if no neighbour was followed by the target
        mixture = -np.logaddexp(np.log(hits), np.log1p(-shares.sum(axis=1)) - nll)
    result: Floats = mixture.astype(np.float32)
    return result
