"""Results of documents, and what they add up to."""

from __future__ import annotations

import math
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from txl_deploy.corpora.documents import Bad, Unit

Count = Annotated[int, Meta(ge=0, lt=2**53)]
"""What every reader of JSON reads as a whole number."""


class Scores(Struct, frozen=True, kw_only=True):
    """The result of one document, and a line of the file of results.

    Attributes:
        index: its place in the corpus, from 0 on.
        id: its name.
        tokens: how many it has; of these `scored` have a result: all after a boundary token, else all but the first.
        nll: mean negative log-likelihood in nats per scored token; None where there is none.
        perplexity: exp of it; None where that is beyond every float.
        bits_per_byte: of the text that was scored; None of token ids, and where the vocabulary lacks words.
        scored_bytes: how many bytes that text has; None of token ids.
        unknown_words: how many words the vocabulary lacks.
        error: why there is no result; not written where there is one.
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
    """The result of a unit whose negative log-likelihoods add up to `total` nats."""
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
    """The line of a document without a result."""
    return Scores(index=bad.index, id=bad.id, error=bad.why)


def measures(total: float, scored: int, scored_bytes: int | None) -> dict[str, float | None]:
    """What a sum of negative log-likelihoods says of so many tokens and bytes; None where there is nothing to say."""
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
    """What results add up to.

    Attributes:
        documents, skipped: how many have a result, and how many have none.
    """

    def __init__(self) -> None:
        self.documents = self.skipped = 0
        self._tokens = self._scored = self._bytes = self._unknown = 0
        self._total, self._is_text = 0.0, True

    def add(self, scores: Scores) -> None:
        """Another document's."""
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
        """All of them: the mean is over tokens and not over documents. Keys are those of a single text, and more."""
        text = self._bytes if self._is_text and not self._unknown else None
        return {
            "tokens": self._tokens,
            **measures(self._total, self._scored, text),
            "unknown_words": self._unknown,
            "scored_tokens": self._scored,
            "documents": self.documents,
            "skipped": self.skipped,
        }
