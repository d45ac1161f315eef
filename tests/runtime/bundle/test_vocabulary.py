"""Byte vocabularies: text to ids and back, and what is refused."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
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


def test_a_bundle_brings_its_vocabulary(make_bundle):
    model = load(make_bundle(config={"vocab_size": 256}, vocabulary=True))
    assert model.manifest.vocabulary == "vocabulary.json"
    assert model.vocabulary is not None
    assert model.vocabulary.encode(b"abc").tolist() == [97, 98, 99]
    assert next(model.stream().generate(model.vocabulary.encode(b"abc"), 1)).shape == (1,)


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


def test_a_vocabulary_is_read_from_its_file(make_bundle, tmp_path):
    path = tmp_path / "small.txl"
    shutil.copytree(make_bundle(config={"vocab_size": 256}, vocabulary=True), path)
    bundle = open_bundle(path)
    assert bundle.vocabulary().encode(b"a").tolist() == [97]
    (path / "vocabulary.json").unlink()
    with pytest.raises(BundleError, match="No such file or directory; expected a readable file"):
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
