"""Compute each token's gain from memory: its loss without memory minus its loss with memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from txl_runtime.types import Ids

from txl_report.measuring.averages import Values, error_of
from txl_report.measuring.results import MemoryGain, TokenGain
from txl_report.measuring.texts import TextPieces

if TYPE_CHECKING:
    from txl_runtime.bundle.vocabulary import Vocabulary

PASSAGE = 256
"""Number of adjacent tokens whose gains are listed one by one."""


def passage_of(
    pieces: TextPieces, ids: Ids, with_memory: Values, without: Values, vocabulary: Vocabulary | None
) -> tuple[TokenGain, ...]:
    """Find the adjacent tokens within one piece of the text that have the largest total gain, each with its losses.

    For example, losses [4, 20, 64]: 4 pieces, 20 segments of 64.

    Args:
        pieces: the pieces of the text that were read.
        ids: int32 [T], the text.
        with_memory, without: losses [sequences, segments, positions] of the same tokens, after the warm-up.
    """
    gain_by_token = np.nan_to_num(without - with_memory, nan=0.0).reshape(len(without), -1)
    gains = gain_by_token.clip(-20, 20)  # otherwise a token that is impossible on only one side would decide the result
    size = min(PASSAGE, gains.shape[1])
    sums = np.cumsum(np.pad(gains, ((0, 0), (1, 0))), axis=1)
    sequence, first = divmod(int(np.argmax(sums[:, size:] - sums[:, :-size])), gains.shape[1] - size + 1)
    place = pieces.place(sequence, pieces.warm_up * pieces.length + first)
    losses = (each[sequence].ravel()[first : first + size].tolist() for each in (with_memory, without))
    # Bytes that are not UTF-8 stay as Python's surrogates, U+DC80 …, so that neighbouring tokens can be joined.
    return tuple(
        TokenGain(
            place + at,
            token := int(ids[place + at]),
            None if vocabulary is None else vocabulary.decode([token]).decode(errors="surrogateescape"),
            *nll,
        )
        for at, nll in enumerate(zip(*losses, strict=True))
    )


def gain_of(with_memory: Values, without: Values) -> MemoryGain:
    """Compute the gain from memory over all tokens; losses are [sequences, segments, positions]."""
    gains = without - with_memory
    return MemoryGain(
        count=gains.size,
        mean=float(gains.mean()),
        error=error_of(gains),
        share_gained=float((gains > 0).mean()),
        doubled=float((gains >= np.log(2)).mean()),
    )
