"""Functions that adjust log-probabilities before a token is drawn: forbid ids, allow a grammar's ids, add biases.

`Sampler` calls one function with the row of all log-probabilities, and draws from the row that the function returns.
`adjustment` builds that function from the caller's options. Masks are applied last: a masked token stays impossible,
even if the caller's function or a bias raises it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from txl_runtime.errors import TxlError, UsageError, one_line
from txl_runtime.streaming.checks import check_listed, is_number, shown
from txl_runtime.types import Ids

Row: TypeAlias = NDArray[np.float64]
"""Natural log-probabilities of one position in vocabulary order, float64 [V]; -inf for a token that is never drawn."""
Adjust: TypeAlias = Callable[[Row, Ids], ArrayLike]
"""A function (row, tokens) → row; tokens are the sequence's ids so far, int32 [n]. The function may change its row.

The ids are the prompt's ids, then the drawn ids. The returned row need not be normalised, and may be float32.
"""
Allow: TypeAlias = Iterable[int] | Callable[[Ids], Iterable[int]]
"""Ids that may be drawn, or a function that returns them when it is given the sequence's ids so far, int32 [n]."""
MOST_BIAS = 100
"""Largest absolute bias of a log-probability; OpenAI's limit. A bias of -100 divides a probability by e^100."""


def adjustment(
    vocab_size: int,
    adjust: Adjust | None = None,
    logit_bias: Mapping[int, float] | None = None,
    allow: Allow | None = None,
    forbid: Iterable[int] = (),
) -> Adjust | None:
    """Return one function that applies all given options, in the order of the arguments; None if no option is given.

    Args:
        vocab_size: number of ids in the vocabulary, the length V of a row.
        adjust: the caller's function of a row.
        logit_bias: numbers to add, -100 … 100 each, by token id.
        allow: the only ids to draw, or a function that returns them before each draw.
        forbid: ids that are never drawn.

    Raises:
        UsageError: an argument is wrong, or no token is left.
    """
    if adjust is not None and not callable(adjust):
        raise UsageError(f"adjust is {shown(adjust)}, expected a function of a row and of tokens, or None")
    biased, biases = _check_bias(logit_bias, vocab_size)
    barred = np.zeros(vocab_size, np.bool_)
    grammar = allow if callable(allow) else None
    if allow is not None and not callable(allow):
        barred[:] = True
        barred[check_listed(allow, vocab_size, "allow")] = False
    barred[check_listed(forbid, vocab_size, "forbid")] = True
    if barred.all():
        raise UsageError(
            f"allow is {shown(allow)} and forbid {shown(forbid)}, expected at least one of {vocab_size} tokens left to "
            "draw; allow more or forbid fewer"
        )
    if adjust is None and grammar is None and not biased.size and not barred.any():
        return None

    def adjusted(row: Row, tokens: Ids) -> Row:
        if adjust is not None:
            row = called(adjust, row, tokens)
        row[biased] += biases
        if grammar is not None:
            ids = check_listed(_asked("allow", grammar, tokens), vocab_size, "what allow returned")
            masked = np.full_like(row, -np.inf)
            masked[ids] = row[ids]
            row = masked
        row[barred] = -np.inf
        return row

    return adjusted


def called(adjust: Adjust, row: Row, tokens: Ids) -> Row:
    """Return a checked float64 copy [V] of the row that the caller's function returns.

    For example, `adjust` gets a row [256] and the tokens so far, [12], and may set entries of the row to -inf.

    Raises:
        UsageError: the function failed, or returned no row to draw from.
    """
    size = len(row)
    result = _asked("adjust", adjust, row, tokens)
    try:
        changed = np.zeros(0) if isinstance(result, np.ma.MaskedArray) else np.asarray(result)
    except Exception:  # raised for an array on a device, or for rows of different lengths
        changed = np.zeros(0, np.object_)
    if changed.shape != (size,) or changed.dtype.kind != "f":
        what = f"{changed.dtype} {list(changed.shape)}" if isinstance(result, np.ndarray) else shown(result)
        raise UsageError(
            f"adjust returned {what}, expected float64 or float32 [{size}], a log-probability for each token; return "
            "the row that it was given, changed"
        )
    best = changed.max()
    if not best < np.inf:  # this is also true if `best` is NaN
        at = int(np.flatnonzero(~(changed < np.inf))[0])
        raise UsageError(
            f"adjust returned {changed[at]} for token {at}, expected a number, or -inf for a token that is never drawn"
        )
    if best == -np.inf:
        raise UsageError(
            f"no token may be drawn after {len(tokens)} tokens: all log-probabilities are -inf, expected at least one "
            "that is not; let allow, forbid and adjust leave one"
        )
    return changed.astype(np.float64)


class Past:
    """The tokens of one sequence so far, in an array that doubles when it is full."""

    def __init__(self) -> None:
        self._held, self._count = np.zeros(0, np.int32), 0

    def add(self, tokens: Ids) -> None:
        """Add tokens, int32 [n]. After `add([3, 5])` and `add([7])`, `tokens()` is [3, 5, 7]."""
        count = self._count + len(tokens)
        if count > len(self._held):
            held = np.empty(2 * count, np.int32)
            held[: self._count] = self._held[: self._count]
            self._held = held
        self._held[self._count : count] = tokens
        self._count = count

    def tokens(self) -> Ids:
        """Return the tokens, int32 [n], read-only; later tokens do not change this array. For example, [3, 5, 7]."""
        tokens = self._held[: self._count]
        tokens.flags.writeable = False
        return tokens


def _asked(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a caller's function and return its result; raise UsageError if the function raises."""
    try:
        return function(*arguments)
    except TxlError:
        raise
    except Exception as error:
        raise UsageError(
            f"{what} failed after {len(arguments[-1])} tokens ({type(error).__name__}: {one_line(error)}), expected a "
            "result; mend it"
        ) from error


def _check_bias(logit_bias: object, vocab_size: int) -> tuple[NDArray[np.int64], Row]:
    """Return token ids [n] and the biases to add to their log-probabilities [n]."""
    if logit_bias is None:
        logit_bias = {}
    if not isinstance(logit_bias, Mapping):
        raise UsageError(f"logit_bias is {shown(logit_bias)}, expected numbers by token id, such as {{17: -100}}")
    ids = check_listed(list(logit_bias), vocab_size, "logit_bias")
    for token, bias in logit_bias.items():
        if not is_number(bias) or not -MOST_BIAS <= bias <= MOST_BIAS:
            raise UsageError(
                f"logit_bias is {shown(bias)} for token {shown(token)}, expected a number, -{MOST_BIAS} … {MOST_BIAS}"
            )
    return ids, np.array(list(logit_bias.values()), np.float64)
