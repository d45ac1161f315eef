"""Make text from strangers safe to show on a page: control characters in it have no effect.

File names, words of a vocabulary and fields of a manifest can hold anything. This module splits a text into pieces:
runs that are shown unchanged, and symbols for characters that cannot be shown. The page escapes both.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MOST = 400
"""Maximum number of characters of a name or value that are shown, because texts of a manifest may have any length."""
_PICTURES = {"\n": "⏎", "\t": "␉", "\x7f": "␡"}
_OBEYED = re.compile("([\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff])")
"""Control characters, line ends, marks that change the direction of text, and surrogates."""


class Piece(NamedTuple):
    """A part of a text: a run of characters, or a symbol that replaces one character."""

    text: str
    symbol: bool = False


def pieces(text: str, most: int = MOST) -> list[Piece]:
    """Split a text into runs and symbols, cut after `most` characters.

    A control character becomes its picture (␀, ⏎), a mark that changes the direction of text its number (U+202E), and a
    byte that is not UTF-8 its hexadecimal value (0x80).
    """
    parts = enumerate(_OBEYED.split(text[:most]))
    result = [Piece(_symbol_of(part), symbol=True) if at % 2 else Piece(part) for at, part in parts if part]
    return result if len(text) <= most else [*result, Piece(f"… ({len(text):,} characters)", symbol=True)]


def as_one_line(text: str, most: int = MOST) -> str:
    """Return the pieces of a text joined as plain text, for names and tooltips, which cannot hold markup."""
    return "".join(piece.text for piece in pieces(text, most))


def _symbol_of(character: str) -> str:
    code = ord(character)
    if character in _PICTURES:
        return _PICTURES[character]
    if code < 0x20:
        return chr(0x2400 + code)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8, which Python holds as a surrogate
        return f"0x{code - 0xDC00:02X}"
    return f"U+{code:04X}"
