"""Define the values that pages show, the reason for a missing value, and the limit on a table's rows."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

MOST_ROWS = 400
"""Maximum number of rows of a table: a stranger's tables may have any number of them."""

Fact = tuple[str, str]
"""A label and its text."""

T = TypeVar("T")


@dataclass(frozen=True)
class Missing:
    """The reason why a fact does not exist.

    Attributes:
        reason: the reason why the fact is missing, as a whole sentence.
        command: the shell command that would provide it; "" if there is no such command.
    """

    reason: str
    command: str = ""


def quoted(name: str) -> str:
    """Quote a file name as one word of a shell command: -x becomes "./-x"."""
    # A program would take a name that begins with "-" for an option.
    return shlex.quote(f"./{name}" if name.startswith("-") else name)


def some(rows: Iterable[T], most: int = MOST_ROWS) -> tuple[T, ...]:
    """Return the first rows of a table, at most `most`."""
    return tuple(islice(rows, most))
