"""Show running text whose tokens are marked by their gain from memory."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator, Sequence

from txl_report.blocks import Coloured, Passage
from txl_report.measuring.results import MemoryGain, TokenGain
from txl_report.numbers import counted, fixed, share, signed
from txl_report.sections.common import table

LEVELS = (math.log(1.1), math.log(2), math.log(5))
"""Gains in nats from which a token is marked weakly, strongly and most strongly."""
LEGEND = (
    (3, "memory makes it at least 5 times as likely"),
    (2, "2 to 5 times"),
    (1, "1.1 to 2 times"),
    (-1, "1.1 to 2 times less likely"),
    (-2, "2 to 5 times less"),
    (-3, "at least 5 times less"),
)
"""Meaning of each mark: (level, words)."""


def passage_block(tokens: Sequence[TokenGain], gain: MemoryGain) -> Passage:
    """Show a passage with the numbers of every token; `gain` is the gain of all measured tokens, for comparison."""
    rows = [
        (
            str(token.place),
            token.text if token.text is not None else str(token.token),
            str(token.token),
            fixed(token.with_memory),
            fixed(token.without_memory),
            signed(token.gain),
        )
        for token in tokens
    ]
    names = ("Place", "Token", "Id", "Loss with memory", "without", "Gain")
    caption = f"Every token of the passage with its losses in nats, {len(tokens)} rows"
    mean = sum(token.gain for token in tokens) / len(tokens)
    return Passage(
        "Passage, its tokens marked by what the memory gained",
        f"Of the {counted(gain.count, 'token')} that count, these {len(tokens)} in a row gained most: {signed(mean)} "
        f"nats per token, all of them {signed(gain.mean)}. Point at a token for its two probabilities.",
        [_coloured(group) for group in groups(tokens)],
        LEGEND,
        table(caption, names, (0, 2, 3, 4, 5), rows, folded=True),
    )


def level_of(gain: float) -> int:
    """Return the strength of a gain's mark: 0 … 3, negative if memory raised the loss; e.g. 2 for a gain of 1 nat."""
    strength = sum(abs(gain) >= least for least in LEVELS)
    return strength if gain > 0 else -strength


def groups(tokens: Sequence[TokenGain]) -> Iterator[list[TokenGain]]:
    """Group tokens whose bytes together make one character; every other token is a group of its own."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    group: list[TokenGain] = []
    for token in tokens:
        raw = _bytes(token)
        if group and not (decoder.getstate()[0] and b"\x80" <= raw[:1] < b"\xc0"):
            yield group
            group = []
            decoder.reset()
        group.append(token)
        decoder.decode(raw)
    if group:
        yield group


def _bytes(token: TokenGain) -> bytes:
    return (token.text or "").encode(errors="surrogateescape")


def _coloured(group: Sequence[TokenGain]) -> Coloured:
    gain = sum(token.gain for token in group)
    known = all(token.text is not None for token in group)
    text = b"".join(map(_bytes, group)).decode(errors="surrogateescape") if known else f"{group[0].token} "
    with_memory, without = (
        share(math.exp(-sum(losses))) for losses in ((t.with_memory for t in group), (t.without_memory for t in group))
    )
    return Coloured(text, level_of(gain), f"{with_memory} with memory, {without} without: {signed(gain)} nats")
