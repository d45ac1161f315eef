"""Token ids of documents, with the boundary token as context where there is one, and the bytes they stand for."""

from __future__ import annotations

import msgspec
import pytest
from frozen import frozen
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.bundle.vocabulary import Bytes, Words

from txl_deploy.corpora.documents import Bad, Document, Unit
from txl_deploy.corpora.encoding import Encoder
from txl_deploy.corpora.totals import scores_of

WORDS = Words(symbols=("<unk>", "<eos>", "a", "b"), unknown=0, line_end=1)


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return open_bundle(frozen("0.8/clusters")).manifest


def document(content: bytes | list[int]) -> Document:
    return Document(3, "name", "file:4", content, 9)


def unit_of(manifest: Manifest, vocabulary: Words | Bytes | None, content: bytes | list[int]) -> Unit:
    unit = Encoder(manifest, vocabulary).unit(document(content))
    assert isinstance(unit, Unit)
    return unit


def test_without_a_boundary_the_first_token_is_only_context(manifest: Manifest) -> None:
    unit = unit_of(manifest, Bytes(), b"\x01\x02\x03")
    assert (unit.index, unit.id, unit.place, unit.weight) == (3, "name", "file:4", 9)
    assert unit.ids.tolist() == [1, 2, 3]
    assert (unit.tokens, unit.scored, unit.scored_bytes) == (3, 2, 2)


def test_the_boundary_is_context_of_the_first_token_and_counts_nowhere(manifest: Manifest) -> None:
    bounded = msgspec.structs.replace(manifest, boundary_token=7)
    unit = unit_of(bounded, Bytes(), b"\x01\x02\x03")
    assert unit.ids.tolist() == [7, 1, 2, 3]
    assert (unit.tokens, unit.scored, unit.scored_bytes) == (3, 3, 3)


@pytest.mark.parametrize("boundary", [None, 7])
def test_an_empty_document_has_no_result(manifest: Manifest, boundary: int | None) -> None:
    bounded = msgspec.structs.replace(manifest, boundary_token=boundary)
    scores = scores_of(unit_of(bounded, Bytes(), b""), 0.0)
    assert (scores.tokens, scores.scored, scores.scored_bytes) == (0, 0, 0)
    assert (scores.nll, scores.perplexity, scores.bits_per_byte) == (None, None, None)
    assert unit_of(bounded, Bytes(), b"\x01").scored == (0 if boundary is None else 1)


def test_words_that_are_not_in_the_vocabulary_are_counted(manifest: Manifest) -> None:
    known, unknown = (unit_of(manifest, WORDS, text) for text in (b"a b\nb", b"a c\nd d\n"))
    assert known.ids.tolist() == [2, 3, 1, 3]
    assert (known.scored_bytes, known.unknown) == (len(b"a b\nb") - len(b"a "), 0)
    assert unknown.unknown == 3
    assert scores_of(known, 2.0).bits_per_byte is not None
    assert scores_of(unknown, 2.0).bits_per_byte is None


@pytest.mark.parametrize(
    ("content", "vocabulary", "said"),
    [
        (b"text", None, "has no vocabulary to read text with"),
        ([1, 41], None, "holds id 41, expected 0 … 40"),
        ([-1], None, "holds id -1, expected 0 … 40"),
        (b"\xff", WORDS, "is not UTF-8"),
        (b"c", Words(symbols=("a",)), "'c' is not among the 1 words"),
    ],
)
def test_what_has_no_token_ids_is_bad_and_named(
    manifest: Manifest, content: bytes | list[int], vocabulary: Words | None, said: str
) -> None:
    bad = Encoder(manifest, vocabulary).unit(document(content))
    assert isinstance(bad, Bad)
    assert bad.why.startswith("file:4: ")
    assert said in bad.why
