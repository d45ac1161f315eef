"""Text that strangers chose, as a page may show it: nothing in it is obeyed, and nothing in it is invisible.

Names of files, words of a vocabulary and fields of a manifest can hold anything. Here a text becomes pieces: runs that
are shown as they are, and symbols that stand for what cannot be shown. The page escapes both.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import NamedTuple

MOST = 400
"""Characters of a name or a value that are shown: a manifest's may be of any length."""
_MARKS = 3
"""Combining marks in a row that are drawn; more would reach into the lines above and below."""
_PICTURES = {"\n": "⏎", "\t": "␉", "\x7f": "␡"}
_TAGS = re.compile("[\U000e0020-\U000e007e]+\U000e007f")
_BLACK_FLAG, _JOINER, _NON_JOINER = "\U0001f3f4", "\u200d", "\u200c"
_HIDDEN = {"Cc", "Cf", "Cs", "Cn", "Zl", "Zp"}
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""Fillers: Unicode calls them letters, marks or signs, and fonts draw nothing for them."""
_MARKED = {"Mn", "Me"}
_PLAIN = re.compile(r"[ -~]*\Z")


class Piece(NamedTuple):
    """A run of a text: what to show, and whether it is a symbol that stands for something else."""

    text: str
    symbol: bool = False


def pieces(text: str, most: int = MOST) -> list[Piece]:
    """A text in runs and symbols, cut after so many characters.

    Control characters are shown as their pictures (␀, ⏎), all else that is invisible, changes the direction of text or
    is no character by its number (U+202E), and bytes that are no UTF-8 in hexadecimal (0x80). Emoji stay whole.
    """
    cut = text[:most]
    if _PLAIN.match(cut):
        found = [Piece(cut)] if cut else []
    else:
        found = [Piece(run, symbol) for run, symbol in _joined(_characters(cut))]
    return found if len(text) <= most else [*found, Piece(f"… ({len(text):,} characters)", symbol=True)]


def as_one_line(text: str, most: int = MOST) -> str:
    """The same as a plain text, for names and tooltips, which can hold no markup."""
    return "".join(piece.text for piece in pieces(text, most))


def symbol_of(character: str) -> str:
    """What stands for a character that is not shown."""
    code = ord(character)
    if character in _PICTURES:
        return _PICTURES[character]
    if code < 0x20:
        return chr(0x2400 + code)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8, as Python holds it
        return f"0x{code - 0xDC00:02X}"
    return f"U+{code:04X}"


def _characters(text: str) -> Iterator[tuple[str, bool]]:
    """Each character, and whether it is a symbol."""
    marks, before, index = 0, "", 0
    while index < len(text):
        character = text[index]
        kind = unicodedata.category(character)
        tags = _TAGS.match(text, index) if before == _BLACK_FLAG else None
        if tags:  # the flag of a region
            yield tags.group(), False
            index, before = tags.end(), ""
            continue
        marks = marks + 1 if kind in _MARKED else 0
        if kind in _MARKED and not before and character not in _BLANK:
            yield f"◌{character}", False  # a mark needs a letter, and the one before is another token's
        elif (kind in _HIDDEN and not _joins(text, index)) or character in _BLANK or marks > _MARKS:
            yield symbol_of(character), True
        else:
            yield character, False
        before, index = character, index + 1


def _joins(text: str, index: int) -> bool:
    """Whether an invisible character holds two others together, as in emoji of several people or in Persian words."""
    if text[index] not in (_JOINER, _NON_JOINER) or not 0 < index < len(text) - 1:
        return False
    beside = text[index - 1], text[index + 1]
    return all(each > "\u02ff" and unicodedata.category(each) not in _HIDDEN for each in beside)


def _joined(characters: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """Neighbours of one kind as one run; every symbol stays alone."""
    run = ""
    for text, symbol in characters:
        if not symbol:
            run += text
            continue
        if run:
            yield run, False
        yield text, True
        run = ""
    if run:
        yield run, False
