"""Reads real text, with which a model is judged, as token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from txl_runtime.bundle.vocabulary import Vocabulary
from txl_runtime.errors import UsageError, one_line
from txl_runtime.types import Ids


def read_tokens(
    text: str | Path | None,
    tokens: str | Path | NDArray[np.integer[Any]] | None,
    vocabulary: Vocabulary | None,
    vocab_size: int,
) -> Ids | None:
    """Return token ids int32 [T] from a text file, an .npy file or an array; None without `text` and `tokens`.

    For example, a vocabulary of bytes reads a file that contains "ab" as [97, 98].

    Raises:
        UsageError: `text` and `tokens` were both given, a file cannot be read, there is no vocabulary for a text, there
            are fewer than 2 ids, or an id is not in 0 … `vocab_size` - 1.
    """
    if text is not None and tokens is not None:
        raise UsageError("both a text and tokens were given, expected one of them; leave --text or --tokens out")
    if text is not None:
        if vocabulary is None:
            bytewise = ' ({"kind": "bytes"} in it, where each byte is a token)' if vocab_size == 256 else ""
            raise UsageError(
                f"{text}: there is no vocabulary to read text with, expected one in the checkpoint or the bundle; "
                f"export with --vocabulary FILE.json{bytewise}, or give --tokens FILE.npy"
            )
        try:
            ids = vocabulary.encode(regular(text).read_bytes())
        except OSError as error:
            raise UsageError(f"{text}: {error.strerror}, expected a text file; check --text") from None
        source = str(text)
    elif tokens is not None:
        source = str(tokens) if isinstance(tokens, str | Path) else "tokens"
        ids = read_ids(tokens) if isinstance(tokens, str | Path) else np.asarray(tokens)
    else:
        return None
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or len(ids) < 2:
        raise UsageError(f"{source}: {ids.dtype} {list(ids.shape)}, expected at least 2 whole numbers in one row")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise UsageError(
            f"{source}: ids {ids.min()} … {ids.max()}, expected 0 … {vocab_size - 1}; check the vocabulary"
        )
    return ids.astype(np.int32)


def regular(path: str | Path) -> Path:
    """Return the path unless it is a pipe, which would wait for a writer, or a device, which may have no end.

    Raises:
        UsageError: the path is a pipe or a device.
    """
    place = Path(path)
    if place.exists() and not (place.is_file() or place.is_dir()):
        raise UsageError(f"{path}: is a pipe or a device, expected a file; save what it gives in a file first")
    return place


def read_ids(path: str | Path) -> NDArray[Any]:
    """Return the array of an .npy file, whatever its shape and dtype, e.g. int64 [100000].

    Raises:
        UsageError: the file cannot be read, or does not contain exactly one array.
    """
    try:
        with regular(path).open("rb") as stream:
            loaded = np.load(stream, allow_pickle=False)
    except UsageError:
        raise
    except Exception as error:  # numpy, tokenize and zipfile raise errors of their own types
        reason = getattr(error, "strerror", None) or one_line(error)
        raise UsageError(f"{path}: {reason}; expected an .npy file of token ids") from None
    if not isinstance(loaded, np.ndarray):
        raise UsageError(f"{path}: holds several arrays, expected an .npy file of token ids, shape [T]")
    return loaded
