"""What the memory did for each token: its loss without memory less its loss with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from txl_runtime.types import Ids, Indices

from txl_report.measuring.averages import Values, error_of
from txl_report.measuring.results import GainInContext, MemoryGain, TokenGain
from txl_report.measuring.texts import TextPieces, piece_of_text, shown_text

if TYPE_CHECKING:
    from txl_runtime.bundle.vocabulary import Vocabulary

TOLD = 8
"""How many tokens that stand out are told, at each end."""
BEFORE, AFTER = 24, 8
"""Tokens of context around them."""


@dataclass(frozen=True)
class Gains:
    """The losses of the same tokens with the whole memory and without any.

    Attributes:
        pieces: what was read.
        ids: int32 [T], the text.
        with_memory, without: losses [sequences, segments, positions], after the warm-up.
        vocabulary: of the bundle.
    """

    pieces: TextPieces
    ids: Ids
    with_memory: Values
    without: Values
    vocabulary: Vocabulary | None

    def passage(self, most: int) -> tuple[TokenGain, ...]:
        """The tokens in a row that gained most together, `most` of one piece at most, each with its losses."""
        found = np.nan_to_num(self.without - self.with_memory, nan=0.0).reshape(len(self.without), -1)
        gains = found.clip(-20, 20)  # one token that is impossible on one side alone does not decide where it is
        size = min(most, gains.shape[1])
        sums = np.cumsum(np.pad(gains, ((0, 0), (1, 0))), axis=1)
        sequence, first = divmod(int(np.argmax(sums[:, size:] - sums[:, :-size])), gains.shape[1] - size + 1)
        start = sequence * gains.shape[1] + first
        return tuple(map(self._token, range(start, start + size)))

    def whole(self) -> MemoryGain:
        """What the memory did for all tokens."""
        gains = self.without - self.with_memory
        flat = gains.ravel()
        order = np.argsort(flat, kind="stable")
        return MemoryGain(
            count=flat.size,
            mean=float(flat.mean()),
            error=error_of(gains),
            share_gained=float((flat > 0).mean()),
            doubled=float((flat >= np.log(2)).mean()),
            most_gained=self._told([index for index in order[::-1] if flat[index] > 0]),
            most_lost=self._told([index for index in order if flat[index] < 0]),
        )

    def _told(self, order: list[int]) -> tuple[GainInContext, ...]:
        """The first of some tokens that do not stand close to each other."""
        return tuple(self._in_context(self._token(int(index))) for index in _apart(order))

    def _token(self, index: int) -> TokenGain:
        sequence, position = divmod(index, self.with_memory[0].size)
        place = self.pieces.place(sequence, self.pieces.warm_up * self.pieces.length + position)
        token = int(self.ids[place])
        losses = float(self.with_memory.flat[index]), float(self.without.flat[index])
        return TokenGain(place, token, piece_of_text(self.vocabulary, [token]), *losses)

    def _in_context(self, token: TokenGain) -> GainInContext:
        before = self.ids[max(0, token.place - BEFORE) : token.place]
        after = self.ids[token.place + 1 : token.place + 1 + AFTER]
        return GainInContext(token, shown_text(self.vocabulary, before), shown_text(self.vocabulary, after))


def _apart(order: list[int]) -> Indices:
    """The first of some places that do not stand within a few tokens of each other: one word is told once."""
    found: list[int] = []
    for index in order:
        if all(abs(index - other) > AFTER for other in found):
            found.append(index)
        if len(found) == TOLD:
            break
    return np.array(found, np.int64)
