"""Define the classes of a document between its file and its result: `Document`, `Bad` and `Unit`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from numpy.typing import ArrayLike
from txl_runtime.types import Ids


def spelled(path: Path) -> str:
    """Return a path as text for results and messages; bytes that are not UTF-8 are escaped."""
    return os.fsencode(path).decode(errors="backslashreplace")


@dataclass(frozen=True, slots=True)
class Document:
    """A document of a corpus.

    Attributes:
        index: index of the document in the corpus; documents that cannot be read are counted, too.
        id: the name that the file gives to the document; if it gives none, the file and the line.
        place: the file and the line, for messages.
        content: text as bytes, or token ids as whole numbers [T].
        weight: number of bytes that the document takes in its file, for progress.
    """

    index: int
    id: str
    place: str
    content: bytes | ArrayLike
    weight: int


@dataclass(frozen=True, slots=True)
class Bad:
    """A document that cannot be scored; `why` names its file and line, what was found, and what to do."""

    index: int
    id: str
    why: str


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of work: token ids that are scored as one sequence that begins with empty memory.

    Attributes:
        index, id, place, weight: the same fields as in `Document`.
        ids: token ids int32 [T]; the first is only context.
        tokens: number of tokens of the document.
        scored_bytes: number of bytes of text that are scored; None for a document of token ids.
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
        """Return the number of tokens that are scored."""
        return max(len(self.ids) - 1, 0)

    @property
    def own(self) -> Ids:
        """Return the document's own tokens, int32 [tokens], without the boundary token before them.

        For example, [5, 9] if `ids` is [0, 5, 9] with the boundary token 0.
        """
        return self.ids[len(self.ids) - self.tokens :]
