"""What the memory did for each token: its loss without memory less its loss with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from txl_runtime.types import Ids, Indices

from txl_report.measuring.averages import Values, error_of
from txl_report.measuring.results import GainInContext, MemoryGain, TokenGain
from txl_report.measuring.texts import Pieces, piece_of_text, shown_text

if TYPE_CHECKING:
    from txl_runtime.bundle.vocabulary import Vocabulary

TOLD = 8
"""How many tokens that stand out are told, at each end."""
BEFORE, AFTER = 24, 8
"""Tokens of context around them."""


def passage_of(
    pieces: Pieces, ids: Ids, with_memory: Values, without: Values, vocabulary: Vocabulary | None, most: int
) -> tuple[TokenGain, ...]:
    """The first tokens that count of the first piece, each with its losses.

    Args:
        pieces: what was read.
        ids: int32 [T], the text.
        with_memory, without: losses [sequences, segments, positions], after the warm-up.
        vocabulary: of the bundle.
        most: tokens at most.
    """
    count = min(most, with_memory[0].size)
    return tuple(_token(pieces, ids, with_memory, without, vocabulary, index) for index in range(count))


def gain_of(
    pieces: Pieces, ids: Ids, with_memory: Values, without: Values, vocabulary: Vocabulary | None
) -> MemoryGain:
    """What the memory did for all tokens; arguments as in `passage_of`."""
    gains = without - with_memory
    flat = gains.ravel()
    order = np.argsort(flat, kind="stable")

    def told(indices: Indices) -> tuple[GainInContext, ...]:
        tokens = [_token(pieces, ids, with_memory, without, vocabulary, int(index)) for index in indices]
        return tuple(_in_context(ids, token, vocabulary) for token in tokens)

    return MemoryGain(
        count=flat.size,
        mean=float(flat.mean()),
        error=error_of(gains),
        share_gained=float((flat > 0).mean()),
        doubled=float((flat >= np.log(2)).mean()),
        most_gained=told(_apart([index for index in order[::-1] if flat[index] > 0])),
        most_lost=told(_apart([index for index in order if flat[index] < 0])),
    )


def _token(
    pieces: Pieces, ids: Ids, with_memory: Values, without: Values, vocabulary: Vocabulary | None, index: int
) -> TokenGain:
    sequence, position = divmod(index, with_memory[0].size)
    place = pieces.place(sequence, pieces.warm_up * pieces.length + position)
    token = int(ids[place])
    losses = float(with_memory.flat[index]), float(without.flat[index])
    return TokenGain(place, token, piece_of_text(vocabulary, [token]), *losses)


def _in_context(ids: Ids, token: TokenGain, vocabulary: Vocabulary | None) -> GainInContext:
    before = ids[max(0, token.place - BEFORE) : token.place]
    after = ids[token.place + 1 : token.place + 1 + AFTER]
    return GainInContext(token, shown_text(vocabulary, before), shown_text(vocabulary, after))


def _apart(order: list[int]) -> Indices:
    """The first of some places that do not stand within a few tokens of each other: one word is told once."""
    found: list[int] = []
    for index in order:
        if all(abs(index - other) > AFTER for other in found):
            found.append(index)
        if len(found) == TOLD:
            break
    return np.array(found, np.int64)
