"""What a document is on its way from a file to a result."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike
from txl_runtime.types import Ids

Done = Callable[[int, int], bool]
"""Asked with a document's index and weight; says whether it needs no reading."""


def spelled(path: Path) -> str:
    """A path as results and messages hold it: bytes that are no UTF-8 are escaped."""
    return os.fsencode(path).decode(errors="backslashreplace")


@dataclass(frozen=True, slots=True)
class Document:
    """A document as it stands in a corpus.

    Attributes:
        index: its place in the corpus, from 0 on; documents that cannot be read count too.
        id: its name: what the file says, else the file and the line.
        place: the file and the line, for messages.
        content: text as bytes, or whole numbers [T] that are token ids.
        weight: bytes of the corpus that it takes, for whoever says how far the work is.
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
    weight: int
    why: str


class Unit(Struct, frozen=True, array_like=True):
    """A piece of work: token ids that are scored as one sequence from fresh memory.

    Attributes:
        index, id, place, weight: of the document.
        data: token ids, int32 in the machine's order; the first is only context.
        skipped: how many of the first results do not count, because these tokens are there for the memory alone.
        tokens: how many tokens the document has.
        scored_bytes: bytes of text that the counted results stand for; None where token ids were given.
        unknown: how many words the vocabulary lacks.
    """

    index: int
    id: str
    place: str
    weight: int
    data: bytes
    tokens: int
    skipped: int = 0
    scored_bytes: int | None = None
    unknown: int = 0

    @property
    def ids(self) -> Ids:
        """The token ids, int32 [T]."""
        return np.frombuffer(self.data, np.int32)

    @property
    def length(self) -> int:
        """T, the number of token ids with the context."""
        return len(self.data) // 4

    @property
    def scored(self) -> int:
        """How many results count."""
        return max(self.length - 1 - self.skipped, 0)


class Outcome(Struct, frozen=True, array_like=True):
    """What became of a unit: the sum of its negative log-likelihoods in nats, or why there is none."""

    total: float | None
    why: str | None = None
