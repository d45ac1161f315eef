"""Define the result of a document, and add up the results of documents."""

from __future__ import annotations

import math
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from txl_deploy.corpora.documents import Bad, Unit

Count = Annotated[int, Meta(ge=0, lt=2**53)]
"""An integer that every JSON reader reads exactly: below 2**53."""


class Scores(Struct, frozen=True, kw_only=True):
    """The result of a document, which is one line of the file of results.

    Attributes:
        index: index of the document in the corpus.
        id: the document's name.
        tokens: the document's number of tokens.
        scored: number of scored tokens, which are all tokens if the bundle has a boundary token, else all but one.
        nll: mean negative log-likelihood in nats per scored token; None if no token is scored.
        perplexity: exp(nll); None beyond the range of float.
        bits_per_byte: bits per byte of the scored text; None for token ids, and if the vocabulary lacks words.
        scored_bytes: number of bytes of the scored text; None for token ids.
        unknown_words: number of words that the vocabulary lacks.
        error: the reason why there is no result; left out if there is a result.
    """

    index: Count
    id: str
    tokens: Count = 0
    scored: Count = 0
    nll: float | None = None
    perplexity: float | None = None
    bits_per_byte: float | None = None
    scored_bytes: Count | None = None
    unknown_words: Count = 0
    error: str | UnsetType = UNSET


def scores_of(unit: Unit, total: float) -> Scores:
    """Return the result of a unit whose negative log-likelihoods add up to `total` nats."""
    measured = measures(total, unit.scored, None if unit.unknown else unit.scored_bytes)
    return Scores(
        index=unit.index,
        id=unit.id,
        tokens=unit.tokens,
        scored=unit.scored,
        nll=measured["nll"],
        perplexity=measured["perplexity"],
        bits_per_byte=measured["bits_per_byte"],
        scored_bytes=unit.scored_bytes,
        unknown_words=unit.unknown,
    )


def left_out(bad: Bad) -> Scores:
    """Return the line of a document without a result."""
    return Scores(index=bad.index, id=bad.id, error=bad.why)


def measures(total: float, scored: int, scored_bytes: int | None) -> dict[str, float | None]:
    """Compute all measures from a sum of negative log-likelihoods in nats; an undefined measure is None."""
    if not scored:
        return {"nll": None, "perplexity": None, "bits_per_token": None, "bits_per_byte": None}
    mean = total / scored
    return {
        "nll": mean,
        "perplexity": math.exp(mean) if mean < 700 else None,
        "bits_per_token": mean / math.log(2),
        "bits_per_byte": total / math.log(2) / scored_bytes if scored_bytes else None,
    }


class Totals:
    """The sums of the results of documents.

    Attributes:
        documents, skipped: number of documents with a result, and without one.
    """

    def __init__(self) -> None:
        self.documents = self.skipped = 0
        self._tokens = self._scored = self._bytes = self._unknown = 0
        self._total, self._is_text = 0.0, True

    def add(self, scores: Scores) -> None:
        """Add a document's result."""
        if scores.error is not UNSET:
            self.skipped += 1
            return
        self.documents += 1
        self._tokens, self._scored = self._tokens + scores.tokens, self._scored + scores.scored
        self._unknown += scores.unknown_words
        self._total += (scores.nll or 0.0) * scores.scored
        self._bytes += scores.scored_bytes or 0
        self._is_text &= scores.scored_bytes is not None

    def document(self) -> dict[str, Any]:
        """Return sums, and means over tokens, as plain data, with the same keys as the result of a single text."""
        text = self._bytes if self._is_text and not self._unknown else None
        return {
            "tokens": self._tokens,
            **measures(self._total, self._scored, text),
            "unknown_words": self._unknown,
            "scored_tokens": self._scored,
            "documents": self.documents,
            "skipped": self.skipped,
        }
