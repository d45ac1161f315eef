"""From tokens to text: whatever the pieces, the text is the same, and nothing is sent that a stop text takes back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from txl_runtime.bundle.vocabulary import Bytes, Words
from txl_runtime.errors import UsageError
from txl_runtime.streaming.texts import TextStream, TokenTexts

LETTERS = st.text(alphabet="abé€😀 ", max_size=12)


def whole(data: bytes, stops: list[str]) -> str:
    """The plain rule: of all stop texts, the one whose end comes first, and before the longest of these."""
    text = data.decode(errors="replace")
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    return text[: min(ends)[1]] if ends else text


@settings(max_examples=400, deadline=None)
@given(
    data=st.one_of(LETTERS.map(str.encode), st.binary(max_size=12), LETTERS.map(lambda text: text.encode()[1:])),
    stops=st.lists(LETTERS.filter(bool), max_size=4),
    cuts=st.lists(st.integers(0, 40), max_size=8),
)
def test_streamed_text_is_the_unstreamed_text(data, stops, cuts):
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    stream, sent = TextStream(stops), ""
    expected = whole(data, stops)
    for first, last in itertools.pairwise(edges):
        sent += stream.feed(data[first:last])
        assert expected.startswith(sent), "what was sent is never taken back"
    sent += stream.finish()
    assert sent == expected
    assert stream.decoded == len(expected)
    assert stream.stopped == any(stop in data.decode(errors="replace") for stop in stops)


def test_possible_stop_texts_and_unfinished_characters_are_held_back():
    stream = TextStream(["END", "E!"])
    assert [stream.feed(piece.encode()) for piece in ("a", "E", "N", "x", "E")] == ["a", "", "", "ENx", ""]
    assert stream.feed(b"\xe2\x82") == ""
    assert stream.feed(b"\xac") == "E€"
    assert stream.feed(b"E!gone") == ""
    assert stream.stopped
    assert stream.feed(b"nothing") + stream.finish() == ""
    assert stream.decoded == 6


def test_a_stop_text_alone_is_one_stop_text_and_not_its_letters():
    stream = TextStream("ab")
    assert stream.feed(b"bxa") == "bx"
    assert stream.feed(b"cab!") == "ac"
    assert stream.stopped


@pytest.mark.parametrize("stops", [["a", ""], [b"a"], 1])
def test_stop_texts_that_are_none_are_refused(stops):
    with pytest.raises(UsageError, match="expected a list of texts of at least one character each"):
        TextStream(stops)


def test_an_unfinished_character_at_the_end_is_replaced():
    stream = TextStream()
    assert stream.feed(b"a\xe2\x82") == "a"
    assert stream.finish() == "\ufffd"


def test_what_is_echoed_stops_nothing_and_its_last_character_may_be_finished_later():
    stream = TextStream(["a"])
    assert stream.echo(b"banana \xc3") == "banana "
    assert stream.decoded == 7
    assert stream.feed(b"\xa9a") == "é"
    assert stream.stopped


@pytest.mark.parametrize(
    ("vocabulary", "token", "name"),
    [
        (Bytes(), 97, "a"),
        (Bytes(), 255, "bytes:\\xff"),
        (Words(symbols=("the", "<eos>"), line_end=1), 0, "the "),
        (Words(symbols=("the", "<eos>"), line_end=1), 1, "\n"),
        (None, 7, "7 "),
    ],
)
def test_tokens_have_names(vocabulary, token, name):
    pieces = TokenTexts(vocabulary)
    assert pieces.name(token) == pieces.name(token) == name
