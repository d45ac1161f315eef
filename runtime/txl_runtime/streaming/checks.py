"""What callers hand in, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import ArrayLike, NDArray

from txl_runtime.errors import UsageError


def check_tokens(
    tokens: ArrayLike, batch_size: int, vocab_size: int, lengths: ArrayLike | None, what: str = "tokens"
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Tokens as int32 [b, T] with zeros in the padding, and lengths as int32 [b].

    Raises:
        UsageError: wrong kind, rank or batch, no column at all, or an id out of range where it counts.
    """
    found = _integers(tokens, what)
    if found.ndim != 2 or found.shape[0] != batch_size or found.shape[1] < 1:
        raise UsageError(
            f"{what} have shape {list(found.shape)}, expected [{batch_size}, T] with T at least 1; "
            "one row per stream, `tokens[None]` for a single one"
        )
    counts = check_lengths(lengths, batch_size, found.shape[1])
    bad = found.astype(np.uint64) >= vocab_size  # what is negative becomes large
    if lengths is not None:
        counted = np.arange(found.shape[1]) < counts[:, None]
        bad &= counted
    if np.count_nonzero(bad):
        row, column = np.argwhere(bad)[0]
        raise UsageError(
            f"{what} hold id {found[row, column]} at [{row}, {column}], expected 0 … {vocab_size - 1}; "
            "check the vocabulary the ids come from"
        )
    kept = found if lengths is None else np.where(counted, found, 0)
    return kept.astype(np.int32), counts


def check_lengths(lengths: ArrayLike | None, batch_size: int, most: int) -> NDArray[np.int32]:
    """How many columns count per stream, int32 [b]; all of them without `lengths`."""
    if lengths is None:
        counts = np.empty(batch_size, np.int32)
        counts.fill(most)
        return counts
    found = _integers(lengths, "lengths")
    if found.shape != (batch_size,) or (found < 0).any() or (found > most).any():
        raise UsageError(
            f"lengths are {found.tolist()}, expected {batch_size} whole numbers of 0 … {most}; 0 leaves a stream idle"
        )
    return found.astype(np.int32)


def check_rows(rows: ArrayLike, streams: int) -> NDArray[np.int64]:
    """Indices of streams: a list of numbers, or one bool per stream."""
    found = as_array(rows, "rows")
    if found.dtype == np.bool_ and found.shape == (streams,):
        return np.flatnonzero(found)
    if found.size == 0:
        return np.empty(0, np.int64)
    found = np.atleast_1d(_integers(rows, "rows"))
    if found.ndim != 1 or (found < 0).any() or (found >= streams).any():
        raise UsageError(f"rows are {found.tolist()}, expected indices of streams, 0 … {streams - 1}")
    return found.astype(np.int64)


def check_stop_tokens(stop_tokens: Iterable[int], vocab_size: int) -> frozenset[int]:
    """The ids that end a sequence."""
    found = tuple(stop_tokens) if isinstance(stop_tokens, Iterable) else None
    if found is None or not all(is_whole(token) and 0 <= token < vocab_size for token in found):
        raise UsageError(f"stop_tokens is {stop_tokens!r}, expected a list of ids, 0 … {vocab_size - 1} each")
    return frozenset(int(token) for token in found)


def as_array(values: ArrayLike, what: str) -> NDArray[Any]:
    """What NumPy makes of it; nested lists must be rectangular."""
    try:
        return np.asarray(values)
    except ValueError:
        raise UsageError(f"{what} have rows of different lengths, expected one rectangular array; pad them") from None
    except (TypeError, RuntimeError, BufferError) as error:  # an array of a device, say
        said = " ".join(str(error).split())
        raise UsageError(f"{what} cannot be read by NumPy ({said}), expected an array in the host's memory") from None


def _integers(values: ArrayLike, what: str) -> NDArray[Any]:
    found = as_array(values, what)
    if not found.size:
        return found.astype(np.int64)  # an empty list has no kind of its own
    if found.dtype.kind not in "iu":
        text = "tokens" in what and found.dtype.kind in "USO"
        advice = "encode text with model.vocabulary.encode" if text else "convert them with astype('int32')"
        raise UsageError(f"{what} are {found.dtype}, expected whole numbers; {advice}")
    return found


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
