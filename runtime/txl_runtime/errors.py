"""The errors that a user can meet.

    TxlError              base of everything raised on purpose
    ├── UsageError        an argument, a token array, an option
    ├── CheckpointError   a checkpoint, or a model's file, that cannot be read
    ├── BundleError       a bundle that is missing, altered, inconsistent or too new
    ├── BackendError      an engine that is not installed or cannot run this bundle
    └── CheckError        a parity gate or a self-test that did not pass

Each message says what was found, what was expected and what to do. `exit_code` is the exit code of the command line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class TxlError(Exception):
    """Base class of every error raised on purpose; the message is one line a user can act on.

    The message may quote names and texts of files, so unprintable characters, such as line ends, are escaped.
    """

    exit_code = 2

    def __init__(self, *said: object) -> None:
        super().__init__(*(printable(str(part)) for part in said))


class UsageError(TxlError, ValueError):
    """An argument has a wrong type, shape or range."""


class CheckpointError(TxlError):
    """A checkpoint, or a model's file, cannot be read."""


class BundleError(TxlError):
    """A bundle is missing, altered, inconsistent or written by a newer version."""


class BackendError(TxlError):
    """An engine is not installed or cannot run this bundle."""


class CheckError(TxlError):
    """A parity gate or a self-test did not pass."""

    exit_code = 1


def printable(text: str) -> str:
    r"""Return a text as one line for any terminal: line ends, controls and surrogates become escapes, e.g. \n."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def brief(text: str) -> str:
    """Return a text for quotation in a message, shortened to 80 characters."""
    return text if len(text) <= 80 else f"{text[:77]}..."


def some(names: Sequence[str], most: int = 3) -> str:
    """Return the first `most` names and the number of further names: "a, b, c and 2 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def nearest(name: str, known: Iterable[str], alike: float = 0.6) -> str:
    """Return the known name that a misspelt or abbreviated name most likely means; "" if no name is near.

    `alike` is the smallest accepted similarity, 0 … 1, as `difflib` measures it.
    """
    names = sorted(known)
    longer = [candidate for candidate in names if len(name) > 1 and candidate.startswith(name)]
    return next(iter(longer or get_close_matches(name, names, 1, alike)), "")


def todo_about(name: str, missing: Iterable[str]) -> str:
    """Return advice for an unknown name, given the names that are missing: "did you mean 'tokens'?" or
    "take it out". A missing name may be the abbreviation: "obs" is meant by "observation".
    """
    names = sorted(missing)
    meant = nearest(name, names) or next((one for one in names if len(one) > 2 and name.startswith(one)), "")
    return f"did you mean {meant!r}?" if meant else "take it out"


def one_line(error: BaseException) -> str:
    """Return the text of a library's error as one line; the middle of a long text is cut, because causes are at the
    ends.

    Paths of the library's own source files are removed, e.g. /onnxruntime_src/core/graph.cc:18.
    """
    text = re.sub(r"/\S+\.(?:cc|cpp|h):\d+ ", "", " ".join(str(error).split()))
    return text if len(text) <= 360 else f"{text[:180]} … {text[-180:]}"
