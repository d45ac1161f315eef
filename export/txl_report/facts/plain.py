"""Values that pages show: texts, numbers, and the reason for a missing one; and their bounds."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

MOST_ROWS = 400
"""Most rows of a table: a stranger's tables may have any number of them."""

Said = tuple[str, str]
"""A label and its text."""

T = TypeVar("T")


@dataclass(frozen=True)
class Missing:
    """The reason why a fact does not exist.

    Attributes:
        reason: why there is nothing, as a whole sentence.
        command: the shell command that would provide it; "" if none does.
    """

    reason: str
    command: str = ""


def quoted(name: str) -> str:
    """Quote a file's name as one word of a shell command, e.g. -x as "./-x"."""
    return shlex.quote(f"./{name}" if name.startswith("-") else name)  # so that it is no option


def some(rows: Iterable[T], most: int = MOST_ROWS) -> tuple[T, ...]:
    """Return the first rows of a table, at most `most`."""
    return tuple(islice(rows, most))
