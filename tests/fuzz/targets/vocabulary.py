"""Vocabularies as JSON, and the texts and ids that they turn into one another."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
from txl_runtime.bundle.vocabulary import Bytes, Words, decode_vocabulary
from txl_runtime.errors import UsageError

from fuzz.choices import Choices
from fuzz.edits import edited

BASES = (
    {"kind": "bytes"},
    {"kind": "words", "symbols": ["<eos>", "<unk>", "a", "b", "ab", "é"], "unknown": 1, "line_end": 0},
    {"kind": "words", "symbols": ["<S>", "a", "b"], "line_start": 0, "line_end": 0, "lower_case": True},
    {"kind": "words", "symbols": list("abc "), "delimiter": ""},
    {"kind": "words", "symbols": ["a", "b", "c,"], "delimiter": ","},
)
SIZES = (256, 6, 3, 1, 1 << 31)


def one_input(data: bytes) -> None:
    """Decode a vocabulary, then a text to ids and back; ids are always below V, and decode to a text."""
    choices = Choices(data)
    size, base = choices.pick(SIZES), choices.pick((None, *BASES))
    text = choices.some()
    document = choices.rest() if base is None else json.dumps(edited(base, choices, 4)).encode()
    vocabulary = decode_vocabulary(document, size, "vocabulary.json")
    refused = None
    try:
        ids = vocabulary.encode(text)
    except UsageError as error:
        refused, ids = error, np.zeros(1, np.int32)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert len(ids) <= 3 * len(text) + 3
    assert ((ids >= 0) & (ids < size)).all(), (ids, size)
    back = vocabulary.decode(ids)
    if isinstance(vocabulary, Bytes):
        assert back == text
    elif refused is None:
        longest = max((len(symbol.encode()) for symbol in vocabulary.symbols), default=0)
        assert len(back) <= (longest + 16 + len((vocabulary.delimiter or "").encode())) * max(len(ids), 1)
        if _plain(vocabulary):
            assert vocabulary.encode(back).tolist() == ids.tolist(), (text, back)
    if refused is not None:
        raise refused


def seeds() -> Iterator[bytes]:
    """Each kind with a text."""
    for size in range(3):
        for number, base in enumerate(BASES, 1):
            yield bytes([size, number, 9]) + "ab b\né\n".encode()
            yield bytes([size, 0, 3]) + b"ab " + json.dumps(base).encode()
            for kind in range(8):
                yield bytes([size, number, 3]) + b"a b" + bytes([2, kind, kind, kind * 7, 1, 0, kind])


def _plain(words: Words) -> bool:
    """Return whether every word can be read back as it was written: distinct words of no white space, no lines."""
    clean = all(word and not any(c.isspace() for c in word) and word == word.strip() for word in words.symbols)
    folded = not words.lower_case
    special = (words.unknown, words.line_start, words.line_end) == (None, None, None)
    return clean and folded and special and words.delimiter is None and len(set(words.symbols)) == len(words.symbols)
