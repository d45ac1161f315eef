"""What callers hand in, checked before anything is computed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import ArrayLike, NDArray

from txl_runtime.errors import UsageError, brief, one_line

MOST_NAMED = 2**16
"""Sequences that a list may name, and ids that may end one, however often it names each."""
FEW = 16
"""Numbers up to which Python's min and max are faster than NumPy's."""
Texts: TypeAlias = str | bytes | Sequence[str | bytes]
"""In place of tokens: the text of one sequence, or one for each."""


def check_tokens(
    tokens: ArrayLike,
    batch_size: int,
    vocab_size: int,
    lengths: ArrayLike | None,
    what: str = "tokens",
    most: int | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Tokens as int32 [b, T] with zeros in the padding, and lengths as int32 [b]; at most one segment, if that is told.

    Raises:
        UsageError: wrong kind, rank or batch, no column at all or too many, or an id out of range where it counts.
    """
    found = _integers(tokens, what)
    if found.ndim == 2:
        check_columns(found.shape[1], most, what)
    if found.ndim != 2 or found.shape[0] != batch_size or found.shape[1] < 1:
        raise UsageError(
            f"{what} have shape {list(found.shape)}, expected [{batch_size}, T] with T at least 1; "
            "one row per stream, `tokens[None]` for a single one"
        )
    counts = check_lengths(lengths, batch_size, found.shape[1])
    kept = found if lengths is None else np.where(np.arange(found.shape[1]) < counts[:, None], found, 0)
    if not ids_fit(kept, vocab_size):
        check_ids(found, kept.astype(np.uint64) >= vocab_size, vocab_size, what)  # what is negative becomes large
    return kept.astype(np.int32), counts


def ids_fit(found: NDArray[Any], vocab_size: int) -> bool:
    """Whether all of some whole numbers are ids of a vocabulary."""
    if found.size == 1:
        value: int = found.item()
        return 0 <= value < vocab_size
    if 0 < found.size <= FEW:
        values: list[int] = found.ravel().tolist()
        return min(values) >= 0 and max(values) < vocab_size
    return not np.count_nonzero(found.astype(np.uint64) >= vocab_size)  # what is negative becomes large


def check_ids(found: NDArray[Any], bad: NDArray[np.bool_], vocab_size: int, what: str) -> None:
    """Refuse ids if some are marked as bad; the message names the first."""
    if np.count_nonzero(bad):
        place = np.argwhere(bad)[0].tolist()
        raise UsageError(
            f"{what} hold id {found[tuple(place)]} at {place}, expected 0 … {vocab_size - 1}; check the vocabulary "
            "the ids come from"
        )


def cut_at(edges: Sequence[int], counts: NDArray[np.int32]) -> Iterator[tuple[int, int, NDArray[np.int32]]]:
    """Segments [first, last) between edges, with the lengths that count in each; segments nobody has are left out."""
    if len(edges) == 2 and np.count_nonzero(counts):  # one segment, as mostly: no sequence has more than it
        yield edges[0], edges[1], counts
        return
    for first, last in pairwise(edges):
        inside = np.clip(counts - first, 0, last - first).astype(np.int32)
        if inside.any():
            yield first, last, inside


def check_columns(columns: int, most: int | None, what: str) -> None:
    """Refuse more than one segment, where `most` says how long one is, and more positions than int32 counts."""
    if most is not None and columns > most:
        raise UsageError(f"{what} have {columns} columns, expected at most one segment of {most}; use feed for more")
    if columns >= 2**31:
        raise UsageError(f"{what} have {columns} columns, expected fewer than 2**31; give them in several calls")


def check_lengths(lengths: ArrayLike | None, batch_size: int, most: int) -> NDArray[np.int32]:
    """How many columns count per stream, int32 [b]; all of them without `lengths`."""
    if lengths is None:
        counts = np.empty(batch_size, np.int32)
        counts.fill(most)
        return counts
    found = _integers(lengths, "lengths")
    if found.shape != (batch_size,) or (found < 0).any() or (found > most).any():
        raise UsageError(
            f"lengths are {few(found)}, expected {batch_size} whole numbers of 0 … {most}; 0 leaves a stream idle"
        )
    return found.astype(np.int32)


def check_rows(rows: ArrayLike, streams: int) -> NDArray[np.int64]:
    """Indices of streams: a list of numbers, or one bool per stream."""
    found = as_array(rows, "rows")
    if found.size > MOST_NAMED:
        raise UsageError(f"rows have shape {list(found.shape)}, expected at most {MOST_NAMED} indices of streams")
    if found.dtype == np.bool_ and found.shape == (streams,):
        return np.flatnonzero(found)
    if found.size == 0:
        return np.empty(0, np.int64)
    found = np.atleast_1d(_integers(rows, "rows"))
    if found.ndim != 1 or (found < 0).any() or (found >= streams).any():
        raise UsageError(f"rows are {few(found)}, expected indices of streams, 0 … {streams - 1}")
    return found.astype(np.int64)


def check_path(path: object) -> Path:
    """A place in the file system."""
    if isinstance(path, str | os.PathLike):
        try:
            found = Path(path)
            named = os.fsencode(found)
        except (TypeError, ValueError):  # of bytes, or of signs that no file's name can have
            named = b"\0"
        if b"\0" not in named:
            return found
    raise UsageError(f"the path is {shown(path)}, expected a str or a pathlib.Path")


def check_flag(value: object, what: str) -> bool:
    """True or False; numbers and NumPy's own stand for them."""
    if not isinstance(value, int | np.bool_ | np.integer):
        raise UsageError(f"{what} is {shown(value)}, expected True or False")
    return bool(value)


def as_array(values: ArrayLike, what: str) -> NDArray[Any]:
    """What NumPy makes of it; nested lists must be rectangular."""
    if type(values) is np.ndarray:
        return values
    if isinstance(values, np.ma.MaskedArray):  # NumPy would forget the mask
        raise UsageError(f"{what} are a masked array, expected a plain one; fill it, and give lengths")
    try:
        return np.asarray(values)
    except ValueError:
        raise UsageError(f"{what} have rows of different lengths, expected one rectangular array; pad them") from None
    except Exception as error:  # an array of a device, say, or an object with an opinion of its own
        said = one_line(error)
        raise UsageError(f"{what} cannot be read by NumPy ({said}), expected an array in the host's memory") from None


def zeros(shape: tuple[int, ...], what: str = "results") -> NDArray[np.float32]:
    """Room for what is computed."""
    try:
        return np.zeros(shape, np.float32)
    except (MemoryError, ValueError):
        raise UsageError(
            f"{what} have shape {list(shape)}, expected what memory can hold; give fewer positions at a time"
        ) from None


def shown(value: object) -> str:
    """An argument as a message quotes it: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # a number of too many digits, say
        text = f"a {type(value).__name__}"
    return brief(text)


def few(found: NDArray[Any]) -> str:
    """The first numbers of an array."""
    return f"{found.tolist()}" if found.size <= 8 else f"{found.flat[:8].tolist()} … ({found.size} in all)"


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


def is_text(tokens: object) -> TypeGuard[Texts]:
    """Whether text stands in place of tokens."""
    first = tokens[0] if isinstance(tokens, list | tuple) and tokens else tokens
    return isinstance(first, str | bytes)
