"""Real text to judge a model on, as token ids."""

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
    """Token ids int32 [T] of a text file or of an .npy file; None when neither was given.

    Raises:
        UsageError: both were given, a file cannot be read, there is no vocabulary for a text, or ids do not fit.
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
    """The path, unless a pipe or a device is there: the one waits for a writer, the other may have no end.

    Raises:
        UsageError: it is neither a file nor a folder, nor missing.
    """
    found = Path(path)
    if found.exists() and not (found.is_file() or found.is_dir()):
        raise UsageError(f"{path}: is a pipe or a device, expected a file; save what it gives in a file first")
    return found


def read_ids(path: str | Path) -> NDArray[Any]:
    """The array in an .npy file, whatever its shape.

    Raises:
        UsageError: the file cannot be read, or holds something else.
    """
    try:
        with regular(path).open("rb") as stream:
            loaded = np.load(stream, allow_pickle=False)
    except UsageError:
        raise
    except Exception as error:  # numpy, tokenize and zipfile each raise their own kinds
        reason = getattr(error, "strerror", None) or one_line(error)
        raise UsageError(f"{path}: {reason}; expected an .npy file of token ids") from None
    if not isinstance(loaded, np.ndarray):
        raise UsageError(f"{path}: holds several arrays, expected an .npy file of token ids, shape [T]")
    return loaded
