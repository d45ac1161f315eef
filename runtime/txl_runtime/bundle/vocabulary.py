"""Vocabularies, which turn text into token ids and back. A bundle keeps its vocabulary as plain, never executed JSON.

{"kind": "bytes"}                                          every byte is a token
{"kind": "words", "symbols": [...], "unknown": 3, ...}     words of lines, as the word-level code bases split them
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Protocol

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import ArrayLike, NDArray

from txl_runtime.bundle.tables import Index
from txl_runtime.errors import BundleError, UsageError, one_line


class Vocabulary(Protocol):
    """A converter of text to token ids and back."""

    def __len__(self) -> int:
        """Return the number of ids that have a text."""

    def encode(self, text: bytes | str) -> NDArray[np.int32]:
        """Return the token ids, int32 [T], of a text; a str stands for its UTF-8.

        A vocabulary of bytes makes [97, 98] of "ab".
        """

    def decode(self, tokens: ArrayLike) -> bytes:
        """Return the text of one token id or of several, as bytes. A vocabulary of bytes makes b"ab" of [97, 98]."""


class Bytes(Struct, frozen=True, tag_field="kind", tag="bytes"):
    """A vocabulary in which every byte is a token."""

    def __len__(self) -> int:
        return 256

    def encode(self, text: bytes | str) -> NDArray[np.int32]:
        """Return the bytes of a text as token ids, int32 [T].

        Example:
            >>> Bytes().encode("ab")
            array([97, 98], dtype=int32)
        """
        return np.frombuffer(_as_bytes(text), np.uint8).astype(np.int32)

    def decode(self, tokens: ArrayLike) -> bytes:
        """Return the text of token ids.

        Raises:
            UsageError: a value is not an id of this vocabulary.

        Example:
            >>> Bytes().decode([97, 98])
            b'ab'
        """
        return _ids(tokens, 256).astype(np.uint8).tobytes()


class Words(Struct, frozen=True, dict=True, tag_field="kind", tag="words", kw_only=True):
    """A vocabulary of words in lines. Text has to be split into words as the training text was; nothing is normalised.

    Attributes:
        symbols: the words, by id.
        unknown: id for all words that are not in `symbols`; None if there is no such id.
        line_start, line_end: ids put before and after the words of each line; None for none.
        lower_case: whether the text is made lower case first.
        delimiter: text between words; None for white space, "" for one word per character.
    """

    symbols: Annotated[tuple[str, ...], Meta(min_length=1)]
    unknown: Index | None = None
    line_start: Index | None = None
    line_end: Index | None = None
    lower_case: bool = False
    delimiter: str | None = None

    def __len__(self) -> int:
        return len(self.symbols)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {symbol: index for index, symbol in enumerate(self.symbols)}

    def encode(self, text: bytes | str) -> NDArray[np.int32]:
        """Return the token ids, int32 [T], of a text.

        Raises:
            UsageError: the text is not UTF-8, or a word is not in the vocabulary and `unknown` is None.

        Example:
            >>> Words(symbols=("<unk>", "<eos>", "a", "rose"), unknown=0, line_end=1).encode("a rose is")
            array([2, 3, 0], dtype=int32)
        """
        text = _as_bytes(text)
        try:
            lines = split_lines(text.decode())
        except UnicodeDecodeError as error:
            raise UsageError(f"the text is not UTF-8 ({error}), expected text; convert it first") from None
        ids: list[int] = []
        for line in lines:
            ids += [] if self.line_start is None else [self.line_start]
            ids += [self._id(word) for word in self._split(line)]
            ids += [] if self.line_end is None else [self.line_end]
        if lines and not text.endswith((b"\n", b"\r")) and self.line_end is not None:
            ids.pop()  # the text, e.g. a prompt, stops in the middle of a line, so the line has no end
        return np.array(ids, np.int32)

    def decode(self, tokens: ArrayLike) -> bytes:
        """Return the text of token ids. An id without a symbol, if V was padded to a round size, becomes e.g. <50257>.

        Raises:
            UsageError: a value is not a token id.

        Example:
            >>> Words(symbols=("a", "rose")).decode([0, 1, 7])
            b'a rose <7> '
        """
        separator = " " if self.delimiter is None else self.delimiter
        parts = []
        for token in _ids(tokens, 2**31).tolist():
            if token == self.line_end:
                parts.append("\n")
            elif token < len(self.symbols):
                parts.append(self.symbols[token] + separator)
            else:
                parts.append(f"<{token}>{separator}")
        return "".join(parts).encode()

    def _split(self, line: str) -> list[str]:
        line = line.strip().lower() if self.lower_case else line.strip()
        return list(line) if self.delimiter == "" else line.split(self.delimiter) if line else []

    def _id(self, word: str) -> int:
        index = self._ids.get(word, self.unknown)
        if index is None:
            raise UsageError(
                f"{word[:100]!r} is not among the {len(self.symbols)} words of the vocabulary, which has no unknown "
                "one; give a text of its words, or token ids"
            )
        return index


def split_lines(text: str) -> list[str]:
    """Return the lines of a text, split only at line ends; str.splitlines would also split at form feeds."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines[:-1] if not lines[-1] else lines


def _as_bytes(text: bytes | str) -> bytes:
    if not isinstance(text, bytes | str):
        raise UsageError(f"the text is {type(text).__name__}, expected bytes or str; read the file first")
    try:
        return text.encode(errors="surrogateescape") if isinstance(text, str) else text
    except UnicodeEncodeError as error:
        raise UsageError(f"the text cannot be written as UTF-8 ({error.reason}), expected text; convert it") from None


def _ids(tokens: ArrayLike, many: int) -> NDArray[np.int64]:
    try:
        ids = np.atleast_1d(np.asarray(tokens))
    except Exception as error:  # raised for rows of different lengths, or by an object's `__array__`
        raise UsageError(f"tokens to decode are no array ({error}), expected ids of 0 … {many - 1}") from None
    if not np.issubdtype(ids.dtype, np.integer) or ids.size >= 2**31:
        raise UsageError(f"tokens to decode are {ids.dtype} {list(ids.shape)}, expected ids of 0 … {many - 1}")
    if (ids < 0).any() or (ids >= many).any():
        raise UsageError(f"tokens to decode are {ids.ravel()[:8].tolist()}, expected ids of 0 … {many - 1}")
    return ids.astype(np.int64).ravel()


def decode_vocabulary(data: bytes, vocab_size: int, source: str) -> Vocabulary:
    """Return the vocabulary in a JSON text.

    Raises:
        BundleError: the text is no vocabulary, or the vocabulary's size does not fit `vocab_size`.
    """
    try:
        vocabulary: Bytes | Words = msgspec.json.decode(data, type=Bytes | Words)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(
            f"{source}: {one_line(error)}; expected a vocabulary; upgrade txl-deploy or export again"
        ) from None
    if isinstance(vocabulary, Bytes):
        if vocab_size != 256:
            raise BundleError(f"{source}: a byte vocabulary has 256 ids, the model has {vocab_size}; leave it out")
        return vocabulary
    special = [index for index in (vocabulary.unknown, vocabulary.line_start, vocabulary.line_end) if index is not None]
    if len(vocabulary.symbols) > vocab_size or max(special, default=0) >= len(vocabulary.symbols):
        raise BundleError(
            f"{source}: {len(vocabulary.symbols)} symbols and special ids {special}, "
            f"expected at most {vocab_size} symbols and ids among them; export the model again"
        )
    return vocabulary
