"""Define the forms of a document between its file and its result."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from numpy.typing import ArrayLike
from txl_runtime.types import Ids


def spelled(path: Path) -> str:
    """Write a path for results and messages: bytes that are no UTF-8 are escaped."""
    return os.fsencode(path).decode(errors="backslashreplace")


@dataclass(frozen=True, slots=True)
class Document:
    """A document of a corpus.

    Attributes:
        index: its place in the corpus, from 0 on; documents that cannot be read count too.
        id: its name, from the file; or the file and the line.
        place: the file and the line, for messages.
        content: text as bytes, or whole numbers [T] that are token ids.
        weight: bytes of the corpus that it takes, for progress.
    """

    index: int
    id: str
    place: str
    content: bytes | ArrayLike
    weight: int


@dataclass(frozen=True, slots=True)
class Bad:
    """A document that cannot be scored: `why` names its file and line, what was found, and what to do."""

    index: int
    id: str
    why: str


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of work: token ids that are scored as one sequence from fresh memory.

    Attributes:
        index, id, place, weight: those of the document.
        ids: token ids int32 [T]; the first is only context.
        tokens: number of tokens of the document.
        scored_bytes: bytes of text that the results cover; None if token ids were given.
        unknown: number of words that the vocabulary lacks.
    """

    index: int
    id: str
    place: str
    weight: int
    ids: Ids
    tokens: int
    scored_bytes: int | None = None
    unknown: int = 0

    @property
    def scored(self) -> int:
        """Return the number of results."""
        return max(len(self.ids) - 1, 0)
