"""Running text whose tokens are marked by what the memory gained for them."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence

from txl_report.blocks import Coloured, Passage
from txl_report.measuring.results import TokenGain
from txl_report.numbers import fixed, share, signed
from txl_report.sections.common import table

LEVELS = (math.log(1.1), math.log(2), math.log(5))
"""Gains in nats from which a token is marked, more strongly and most."""
LEGEND = (
    (3, "memory makes it at least 5 times as likely"),
    (2, "2 to 5 times"),
    (1, "1.1 to 2 times"),
    (-1, "1.1 to 2 times less likely"),
    (-2, "2 to 5 times less"),
    (-3, "at least 5 times less"),
)
_JOINER = "\u200d"
_FOLLOWS = {"Mn", "Me", "Mc", "Sk"}
LONGEST = 32
"""Tokens that are shown as one at most."""


def passage_block(tokens: Sequence[TokenGain], whole: float) -> Passage:
    """The passage, and the numbers of every token; `whole` is the mean gain over the whole text, to hold it against."""
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
        f"Of all that was measured, these {len(tokens)} tokens in a row gained most: {signed(mean)} nats per token, "
        f"over the whole text {signed(whole)}. Point at a token for its two probabilities.",
        [_coloured(group) for group in groups(tokens)],
        LEGEND,
        table(caption, names, (0, 2, 3, 4, 5), rows, folded=True),
    )


def level_of(gain: float) -> int:
    """How strongly a gain is marked: 0 … 3, below zero for a loss."""
    strength = sum(abs(gain) >= least for least in LEVELS)
    return strength if gain > 0 else -strength


def groups(tokens: Sequence[TokenGain]) -> Iterator[list[TokenGain]]:
    """Tokens that make up one character together, such as the bytes of an emoji, as one group; else each alone."""
    group: list[TokenGain] = []
    for token in tokens:
        if group and not (len(group) < LONGEST and _goes_on(group, token)):
            yield group
            group = []
        group.append(token)
    if group:
        yield group


def _goes_on(group: Sequence[TokenGain], token: TokenGain) -> bool:
    """Whether a token is a part of the character that those before it have begun."""
    before, after = _bytes(_text(group)), _bytes(token.text or "")
    if before is None or after is None or not after:
        return False
    missing = _unfinished(before)
    if missing:
        return 0x80 <= after[0] < 0xC0
    text, begins = _text(group), (token.text or " ")[0]
    return text.endswith(_JOINER) or begins == _JOINER or (bool(text.strip()) and _modifies(begins))


def _modifies(character: str) -> bool:
    return unicodedata.category(character) in _FOLLOWS and character > "\u02ff"


def _unfinished(text: bytes) -> bool:
    """Whether bytes end in the middle of a character of UTF-8."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte >= 0xC2:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) and byte < 0xF5
        if byte < 0x80:
            return False
    return False


def _text(group: Sequence[TokenGain]) -> str:
    """What the tokens of a group say together; bytes that make up characters are those characters."""
    text = "".join(token.text or "" for token in group)
    raw = _bytes(text)
    return text if raw is None else raw.decode(errors="surrogateescape")


def _bytes(text: str) -> bytes | None:
    """A text as its bytes; None where it has something that no bytes stand for."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return None


def _coloured(group: Sequence[TokenGain]) -> Coloured:
    gain = sum(token.gain for token in group)
    known = all(token.text is not None for token in group)
    text = _text(group) if known else " ".join(str(token.token) for token in group) + " "
    with_memory, without = (
        share(math.exp(-sum(losses))) for losses in ((t.with_memory for t in group), (t.without_memory for t in group))
    )
    return Coloured(text, level_of(gain), f"{with_memory} with memory, {without} without: {signed(gain)} nats")
