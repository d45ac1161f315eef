"""Values that pages show: texts, numbers, and what stands where there is nothing; and their bounds."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

MOST_ROWS = 400
"""Rows of a table: a stranger's tables may have any number of them."""

Said = tuple[str, str]
"""A name, and what is said of it."""

T = TypeVar("T")


@dataclass(frozen=True)
class Missing:
    """What stands where there is nothing to show.

    Attributes:
        reason: why there is nothing, as a whole sentence.
        command: what to run to get it, for a shell; "" where nothing does.
    """

    reason: str
    command: str = ""


def quoted(name: str) -> str:
    """The name of a file as one word of a command for a shell, whatever characters it has."""
    return shlex.quote(f"./{name}" if name.startswith("-") else name)  # and no option


def some(rows: Iterable[T], most: int = MOST_ROWS) -> tuple[T, ...]:
    """The first rows of a table, `most` of them at the most."""
    return tuple(islice(rows, most))
