"""Checks of the arguments of stream methods, made before anything is computed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import ArrayLike, NDArray

from txl_runtime.errors import UsageError, brief, one_line

MOST_NAMED = 2**16
"""Maximum number of entries of a list of rows, of stop tokens or of stop texts: a longer list is a mistake or an
attack."""
FEW = 16
"""Maximum number of ids for which Python's min and max are faster than NumPy."""
Texts: TypeAlias = str | bytes | Sequence[str | bytes]
"""Text in place of token ids: a str or bytes for one sequence, or a list with one text per sequence."""


def check_tokens(
    tokens: ArrayLike,
    batch_size: int,
    vocab_size: int,
    lengths: ArrayLike | None,
    what: str = "tokens",
    most: int | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return tokens as int32 [b, T], zero beyond `lengths`, and lengths as int32 [b]; refuse T above `most`, if given.

    Raises:
        UsageError: wrong type, rank or number of rows, T below 1 or above `most`, or an id within `lengths` is out of
            range.

    Example:
        >>> check_tokens([[5, 6, 7], [8, 9, 9]], 2, 10, [3, 1])
        (array([[5, 6, 7],
               [8, 0, 0]], dtype=int32), array([3, 1], dtype=int32))
    """
    ids = _integers(tokens, what)
    if ids.ndim == 2:
        check_columns(ids.shape[1], most, what)
    if ids.ndim != 2 or ids.shape[0] != batch_size or ids.shape[1] < 1:
        raise UsageError(
            f"{what} have shape {list(ids.shape)}, expected [{batch_size}, T] with T at least 1; "
            "one row per stream, `tokens[None]` for a single one"
        )
    counts = check_lengths(lengths, batch_size, ids.shape[1])
    counted = ids if lengths is None else np.where(np.arange(ids.shape[1]) < counts[:, None], ids, 0)
    if not ids_fit(counted, vocab_size):
        check_ids(ids, counted.astype(np.uint64) >= vocab_size, vocab_size, what)  # as uint64, -1 becomes 2**64 - 1
    return counted.astype(np.int32), counts


def ids_fit(found: NDArray[Any], vocab_size: int) -> bool:
    """Return whether all numbers of an integer array are in 0 … vocab_size - 1: True for [0, 2] and 3."""
    if found.size == 1:
        value: int = found.item()
        return 0 <= value < vocab_size
    if 0 < found.size <= FEW:
        values: list[int] = found.ravel().tolist()
        return min(values) >= 0 and max(values) < vocab_size
    return not np.count_nonzero(found.astype(np.uint64) >= vocab_size)  # as uint64, -1 becomes 2**64 - 1


def check_ids(found: NDArray[Any], bad: NDArray[np.bool_], vocab_size: int, what: str) -> None:
    """Raise UsageError for the first id that `bad` marks, if any.

    For example, the error names id 300 for ids [[1, 300]] with `bad` [[False, True]] if V is 256.
    """
    if np.count_nonzero(bad):
        place = np.argwhere(bad)[0].tolist()
        raise UsageError(
            f"{what} hold id {found[tuple(place)]} at {place}, expected 0 … {vocab_size - 1}; check the vocabulary "
            "the ids come from"
        )


def check_listed(given: object, vocab_size: int, what: str) -> NDArray[np.int64]:
    """Return a list of token ids as int64 [n], e.g. from [0, 3], {5} or an array; raise UsageError for
    anything else.
    """
    if isinstance(given, np.ndarray) and given.ndim == 1 and given.dtype.kind in "iu":
        if ids_fit(given, vocab_size):
            return given.astype(np.int64)
    else:
        most = max(MOST_NAMED, vocab_size)
        try:
            values: tuple[Any, ...] = tuple(islice(given, most + 1))  # type: ignore[call-overload]
        except Exception:  # raised if `given` is not iterable or has no axes, or by its `__iter__`
            values = (None,)
        if len(values) <= most and all(is_whole(token) and 0 <= token < vocab_size for token in values):
            return np.array(values, np.int64)
    raise UsageError(f"{what} is {shown(given)}, expected a list of ids, 0 … {vocab_size - 1} each")


def cut_at(edges: Sequence[int], counts: NDArray[np.int32]) -> Iterator[tuple[int, int, NDArray[np.int32]]]:
    """Yield (first, last, counts) of each segment between two edges; skip segments in which all counts are 0.

    Example:
        >>> [(first, last, inside.tolist()) for first, last, inside in cut_at([0, 4, 6], np.int32([5, 2]))]
        [(0, 4, [4, 2]), (4, 6, [1, 0])]
    """
    if len(edges) == 2 and np.count_nonzero(counts):  # a shortcut for one segment, the usual case
        yield edges[0], edges[1], counts
        return
    for first, last in pairwise(edges):
        inside = np.clip(counts - first, 0, last - first).astype(np.int32)
        if inside.any():
            yield first, last, inside


def check_columns(columns: int, most: int | None, what: str) -> None:
    """Raise UsageError for more columns than `most`, or for 2**31 or more, which int32 cannot count."""
    if most is not None and columns > most:
        raise UsageError(f"{what} have {columns} columns, expected at most one segment of {most}; use feed for more")
    if columns >= 2**31:
        raise UsageError(f"{what} have {columns} columns, expected fewer than 2**31; give them in several calls")


def check_lengths(lengths: ArrayLike | None, batch_size: int, most: int) -> NDArray[np.int32]:
    """Return lengths as int32 [b], each 0 … most; all are `most` if `lengths` is None.

    Example:
        >>> check_lengths([3, 0], 2, 8)
        array([3, 0], dtype=int32)
    """
    if lengths is None:
        counts = np.empty(batch_size, np.int32)
        counts.fill(most)
        return counts
    array = _integers(lengths, "lengths")
    if array.shape != (batch_size,) or (array < 0).any() or (array > most).any():
        raise UsageError(
            f"lengths are {few(array)}, expected {batch_size} whole numbers of 0 … {most}; 0 leaves a stream idle"
        )
    return array.astype(np.int32)


def check_rows(rows: ArrayLike, streams: int) -> NDArray[np.int64]:
    """Return indices of streams, int64, from whole numbers or one bool per stream: [0, 2] from [True, False, True]."""
    array = as_array(rows, "rows")
    if array.size > MOST_NAMED:
        raise UsageError(f"rows have shape {list(array.shape)}, expected at most {MOST_NAMED} indices of streams")
    if array.dtype == np.bool_ and array.shape == (streams,):
        return np.flatnonzero(array)
    if array.size == 0:
        return np.empty(0, np.int64)
    array = np.atleast_1d(_integers(rows, "rows"))
    if array.ndim != 1 or (array < 0).any() or (array >= streams).any():
        raise UsageError(f"rows are {few(array)}, expected indices of streams, 0 … {streams - 1}")
    return array.astype(np.int64)


def check_path(path: object) -> Path:
    """Return a path from a str or an os.PathLike; raise UsageError for anything else."""
    if isinstance(path, str | os.PathLike):
        try:
            place = Path(path)
            named = os.fsencode(place)
        except (TypeError, ValueError):  # raised for a PathLike of bytes, or characters that no file name has
            named = b"\0"
        if b"\0" not in named:
            return place
    raise UsageError(f"the path is {shown(path)}, expected a str or a pathlib.Path")


def check_flag(value: object, what: str) -> bool:
    """Return the value as True or False; whole numbers and NumPy's booleans are accepted, anything else raises
    UsageError.
    """
    if not isinstance(value, int | np.bool_ | np.integer):
        raise UsageError(f"{what} is {shown(value)}, expected True or False")
    return bool(value)


def as_array(values: ArrayLike, what: str) -> NDArray[Any]:
    """Return the values as an array; nested lists have to be rectangular, e.g. [[1, 2], [3, 4]]."""
    if type(values) is np.ndarray:
        return values
    if isinstance(values, np.ma.MaskedArray):  # np.asarray would ignore the mask
        raise UsageError(f"{what} are a masked array, expected a plain one; fill it, and give lengths")
    try:
        return np.asarray(values)
    except ValueError:
        raise UsageError(f"{what} have rows of different lengths, expected one rectangular array; pad them") from None
    except Exception as error:  # raised for an array on a device, or by an object's `__array__`
        reason = one_line(error)
        raise UsageError(f"{what} cannot be read by NumPy ({reason}), expected an array in the host's memory") from None


def zeros(shape: tuple[int, ...], what: str = "results") -> NDArray[np.float32]:
    """Return float32 zeros, e.g. [b, T, V], to hold results; raise UsageError if memory does not suffice.

    For example, `zeros((2, 3, 256))`.
    """
    try:
        return np.zeros(shape, np.float32)
    except (MemoryError, ValueError):
        raise UsageError(
            f"{what} have shape {list(shape)}, expected what memory can hold; give fewer positions at a time"
        ) from None


def shown(value: object) -> str:
    """Return a short text of any value, for a message."""
    try:
        text = repr(value)
    except Exception:  # raised e.g. for an int of more digits than Python prints, or by a `__repr__`
        text = f"a {type(value).__name__}"
    return brief(text)


def few(found: NDArray[Any]) -> str:
    """Return the first 8 numbers of an array as text for a message: "[0, 1, 2, 3, 4, 5, 6, 7] … (20 in all)"."""
    return f"{found.tolist()}" if found.size <= 8 else f"{found.flat[:8].tolist()} … ({found.size} in all)"


def _integers(values: ArrayLike, what: str) -> NDArray[Any]:
    array = as_array(values, what)
    if not array.size:
        return array.astype(np.int64)  # NumPy makes an empty list float64
    if array.dtype.kind not in "iu":
        text = "tokens" in what and array.dtype.kind in "USO"
        advice = "encode text with model.vocabulary.encode" if text else "convert them with astype('int32')"
        raise UsageError(f"{what} are {array.dtype}, expected whole numbers; {advice}")
    return array


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number, Python's or NumPy's; True and False are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number, Python's or NumPy's; True and False are not."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def is_text(tokens: object) -> TypeGuard[Texts]:
    """Return whether the argument is text instead of token ids."""
    first = tokens[0] if isinstance(tokens, list | tuple) and tokens else tokens
    return isinstance(first, str | bytes)
