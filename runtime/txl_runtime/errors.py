"""The errors a user can meet.

    TxlError              base of everything raised on purpose
    ├── UsageError        an argument, a token array, an option
    ├── CheckpointError   a checkpoint that cannot be read as a Transformer-XL
    ├── BundleError       a bundle that is missing, altered, inconsistent or too new
    ├── BackendError      an engine that is not installed or cannot run this bundle
    └── CheckError       a parity gate or a self-test that did not pass

Each message says what was found, what was expected and what to do. `exit_code` is what the command line returns.
"""

from __future__ import annotations

from collections.abc import Sequence


class TxlError(Exception):
    """Base class of every error raised on purpose; the message is one line a user can act on.

    It quotes names and texts of files, so what is not printable, such as the end of a line, stands there escaped.
    """

    exit_code = 2

    def __init__(self, *said: object) -> None:
        super().__init__(*(printable(str(part)) for part in said))


class UsageError(TxlError, ValueError):
    """An argument is of the wrong kind, shape or range."""


class CheckpointError(TxlError):
    """A checkpoint cannot be read as a Transformer-XL."""


class BundleError(TxlError):
    """A bundle is missing, altered, inconsistent or written by a newer version."""


class BackendError(TxlError):
    """An engine is not installed or cannot run this bundle."""


class CheckError(TxlError):
    """A parity gate or a self-test did not pass."""

    exit_code = 1


def printable(text: str) -> str:
    """A text as one line that any terminal can show: ends of lines, control characters and surrogates as escapes."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def brief(text: str) -> str:
    """What a file or a caller says, as a message quotes it: a line of it at most."""
    return text if len(text) <= 80 else f"{text[:77]}..."


def some(names: Sequence[str], most: int = 3) -> str:
    """The first of some names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def one_line(error: BaseException) -> str:
    """What another library's error says, in one line; of a long one its beginning and its end, where causes stand."""
    text = " ".join(str(error).split())
    return text if len(text) <= 360 else f"{text[:180]} … {text[-180:]}"
