"""Text that strangers chose: nothing in it is obeyed, and what people write stays whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from txl_report.visible import MOST, Piece, as_one_line, pieces


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("a\x00\t\r\n\x7f", "a␀␉␍⏎␡"),
        ("\x1b[31m", "␛[31m"),
        ("\x9b", "U+009B"),
        ("\u202egpj\u2069", "U+202EgpjU+2069"),
        ("\udc80\udcff", "0x800xFF"),
        ("a\u0301", "a\u0301"),
        ("👨\u200d👩 👍🏽", "👨\u200d👩 👍🏽"),
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("", ""),
    ],
)
def test_what_is_obeyed_has_a_symbol(text: str, expected: str):
    assert as_one_line(text) == expected


def test_symbols_are_told_from_text_that_looks_like_them():
    assert pieces("␀\x00") == [Piece("␀"), Piece("␀", symbol=True)]


def test_long_texts_are_cut_and_say_so():
    found = pieces("x" * (MOST + 1))
    assert found[0] == Piece("x" * MOST)
    assert found[1] == Piece("… (401 characters)", symbol=True)


@settings(max_examples=40, deadline=None)
@given(st.text())
def test_nothing_is_lost_and_nothing_is_obeyed(text: str):
    found = pieces(text, most=10_000)
    kept = "".join(piece.text for piece in found if not piece.symbol)
    assert not set(kept) & set(map(chr, [*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0xD800, 0xE000)]))
    as_one_line(text).encode()
    assert len(found) <= len(text)
