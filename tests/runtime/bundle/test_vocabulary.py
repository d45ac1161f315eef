"""Byte vocabularies: text to ids and back, and what is refused."""

from __future__ import annotations

import time

import numpy as np
import pytest
from frozen import frozen
from resealing import copied
from txl_runtime import BundleError, UsageError, load
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.bundle.vocabulary import Bytes, Words, decode_vocabulary


def test_every_byte_is_the_token_of_its_value():
    text = bytes(range(256))
    tokens = Bytes().encode(text)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == list(range(256))
    assert Bytes().decode(tokens) == text


@pytest.mark.parametrize("text", [b"", b"\n", "über 中文".encode(), b"\xff\x00\xfe"], ids=repr)
def test_decoding_undoes_encoding(text):
    vocabulary = decode_vocabulary(b'{"kind": "bytes"}', 256, "vocabulary.json")
    assert vocabulary.decode(vocabulary.encode(text)) == text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"\xff",
        b'{"kind": "\xff"}',
        b'{"kind": 1}',
        b'{"kind": "sentencepiece"}',
        b"[" * 100_000,
    ],
    ids=lambda data: repr(data[:20]),
)
def test_what_is_no_vocabulary_is_refused(data):
    with pytest.raises(BundleError, match=r"^vocabulary\.json: .+(upgrade txl-deploy|export)") as caught:
        decode_vocabulary(data, 256, "vocabulary.json")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("size", [1, 255, 257, 60])
def test_a_byte_vocabulary_is_for_256_ids(size):
    with pytest.raises(BundleError, match=f"a byte vocabulary has 256 ids, the model has {size}"):
        decode_vocabulary(b'{"kind": "bytes"}', size, "vocabulary.json")


def test_a_bundle_brings_its_vocabulary_which_is_read_from_its_file(tmp_path):
    model = load(copied(frozen("clusters"), tmp_path / "small.txl"))
    assert model.vocabulary is not None
    assert len(model.vocabulary) == model.vocab_size == 256
    assert model.vocabulary.encode(b"abc").tolist() == [97, 98, 99]
    bundle = open_bundle(tmp_path / "small.txl")
    (tmp_path / "small.txl" / "vocabulary.json").unlink()
    with pytest.raises(BundleError, match=r"vocabulary\.json: missing, expected a file of 16 bytes"):
        bundle.vocabulary()


def test_what_a_newer_version_added_to_a_vocabulary_is_ignored():
    assert decode_vocabulary(b'{"kind": "bytes", "from the future": 1}', 256, "here").encode(b"a").tolist() == [97]


def test_lines_end_where_a_file_ends_them_and_nowhere_else():
    words = Words(symbols=("a", "b", "<eos>", "<unk>"), unknown=3, line_end=2)
    assert words.encode("a\r\nb\n").tolist() == [0, 2, 1, 2]
    assert words.encode("a\u2028b\x0ca\n").tolist().count(2) == 1, "these are white space, not line ends"


def test_one_id_is_one_token_and_text_may_be_a_str():
    assert Bytes().decode(65) == b"A"
    assert Bytes().encode("A").tolist() == [65]
    with pytest.raises(UsageError, match="expected ids"):
        Bytes().decode([300])


LONG = 300_000


@pytest.mark.parametrize(
    ("delimiter", "text"),
    [
        (None, "a"),
        (None, " "),
        (None, "a "),
        ("", "a"),
        ("", "é"),
        ("ab", "ab\n"),
        ("ab", "\r"),
        ("a", "a"),
        ("a", "\n"),
    ],
    ids=ascii,
)
def test_text_of_any_kind_takes_time_as_its_length(delimiter, text):
    """A tenth of the text in a tenth of the time, roughly: nothing grows with the square."""
    vocabulary = Words(symbols=("a", "b", "é", "?"), unknown=3, line_start=0, line_end=1, delimiter=delimiter)
    seconds = []
    for length in (LONG // 10, LONG):
        began = time.process_time()
        ids = vocabulary.encode(text * (length // len(text)))
        vocabulary.decode(ids)
        seconds.append(time.process_time() - began)
    assert seconds[1] < 40 * max(seconds[0], 0.02)


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "\ud800\udc00"], ids=ascii)
def test_text_that_has_no_bytes_is_refused(text):
    for vocabulary in (Bytes(), Words(symbols=("a",), unknown=0)):
        with pytest.raises(UsageError, match="cannot be written as UTF-8"):
            vocabulary.encode(text)
    assert Bytes().encode("\udc80").tolist() == [0x80], "a byte that was no UTF-8 in a file or an argument"


def test_a_word_of_any_length_makes_a_short_message():
    with pytest.raises(UsageError) as caught:
        Words(symbols=("a",)).encode("x" * 1_000_000)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "tokens", [[[1], [1, 2]], [None], ["a" * 5000], np.array([object()]), [2**70], [0.5]], ids=range(6)
)
def test_what_is_no_ids_is_refused(tokens):
    for vocabulary in (Bytes(), Words(symbols=("a",))):
        with pytest.raises(UsageError, match="tokens to decode are") as caught:
            vocabulary.decode(tokens)
        assert len(str(caught.value)) < 500
