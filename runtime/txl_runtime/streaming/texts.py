r"""Conversion of text to tokens, and of tokens to text one by one, holding back unfinished characters.

The tokens' bytes are joined and read as UTF-8. Bytes that are not UTF-8 become U+FFFD in a text; a single token of
bytes that are not UTF-8 is named e.g. `bytes:\xff`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from txl_runtime.bundle.vocabulary import Vocabulary
from txl_runtime.errors import UsageError
from txl_runtime.streaming.checks import MOST_NAMED, Texts, shown
from txl_runtime.types import Ids


def encoded(texts: Texts, lengths: ArrayLike | None, vocabulary: Vocabulary | None, batch_size: int) -> tuple[Ids, Ids]:
    """Return texts as tokens int32 [b, T] and lengths int32 [b]. A single str or bytes is one sequence.

    With a vocabulary of bytes, ["ab", "c"] becomes [[97, 98], [99, 0]] and [2, 1].

    Raises:
        UsageError: there is no vocabulary, it cannot encode a text, `lengths` is given, or there are not b texts.
    """
    if vocabulary is None:
        raise UsageError(
            f"tokens are text ({shown(texts)}), but the bundle has no vocabulary to encode it with, expected token "
            "ids; give these, or export with --vocabulary FILE"
        )
    if lengths is not None:
        raise UsageError(f"lengths are {shown(lengths)}, expected none beside text, which counts whole; leave them out")
    listed = [texts] if isinstance(texts, str | bytes) else texts
    if len(listed) != batch_size:
        wanted = f"{batch_size} texts, a list with one for each sequence" if batch_size > 1 else "one text"
        raise UsageError(f"tokens are text ({shown(texts)}), expected {wanted}")
    return padded([vocabulary.encode(text) for text in listed])


def padded(sequences: Sequence[Ids]) -> tuple[Ids, Ids]:
    """Return int32 [b, T], padded with zeros, and lengths [b]: [[1, 2], [3]] gives [[1, 2], [3, 0]] and [2, 1]."""
    lengths = np.array([len(ids) for ids in sequences], np.int32)
    ids_by_row = np.zeros((len(sequences), int(lengths.max(initial=0))), np.int32)
    for row, ids in zip(ids_by_row, sequences, strict=True):
        row[: len(ids)] = ids
    return ids_by_row, lengths


class TokenTexts:
    """A cache of the bytes and names of tokens."""

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self._vocabulary = vocabulary
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, str] = {}

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; without a vocabulary, its id and a space, e.g. b"17 "."""
        text = self._bytes.get(token)
        if text is None:
            text = f"{token} ".encode() if self._vocabulary is None else self._vocabulary.decode([token])
            self._bytes[token] = text
        return text

    def name(self, token: int) -> str:
        r"""The name that clients see for a token: its text, or e.g. `bytes:\xff` if its bytes are not UTF-8."""
        text = self._names.get(token)
        if text is None:
            data = self.bytes_of(token)
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._names[token] = text
        return text


def check_stop_texts(stop_texts: object, what: str = "stop_texts") -> tuple[str, ...]:
    """Return the texts that end a sequence as a tuple; a single str becomes a tuple of one text.

    Raises:
        UsageError: the argument is no list of texts, or a text is empty.
    """
    texts: Any = (stop_texts,) if isinstance(stop_texts, str) else stop_texts
    listed = isinstance(texts, list | tuple) and len(texts) <= MOST_NAMED
    if not listed or not all(isinstance(text, str) and text for text in texts):
        raise UsageError(f"{what} is {shown(stop_texts)}, expected a list of texts of at least one character each")
    return tuple(texts)


class TextStream:
    """A decoder of tokens that come one by one, which holds back text that may become a stop text.

    The text ends before the stop text that is complete first; if several end at the same place, before the longest. So
    the result does not depend on how the text is cut into tokens.

    Args:
        stops: the stop texts; a str is one stop text.

    Attributes:
        decoded: number of characters decoded so far, held-back ones included; the next token's text begins there.
            Characters from a stop text on are not counted.
        stopped: True after a stop text; later text is ignored.

    Raises:
        UsageError: the stop texts are no list of texts, or a text is empty.
    """

    def __init__(self, stops: str | Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops, self._held = check_stop_texts(stops, "stops"), ""
        self.decoded, self.stopped = 0, False

    def echo(self, piece: bytes) -> str:
        """Return the text of a prompt token, without looking for stop texts in it."""
        text = self._decoder.decode(piece)
        self.decoded += len(text)
        return text

    def feed(self, piece: bytes) -> str:
        """Take the bytes of a token, and return the text that is now certain."""
        return "" if self.stopped else self._more(self._decoder.decode(piece), last=False)

    def finish(self) -> str:
        """Return the text that was held back; call it after the last token."""
        return "" if self.stopped else self._more(self._decoder.decode(b"", final=True), last=True)

    def _more(self, text: str, last: bool) -> str:
        self.decoded += len(text)
        held = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := held.find(stop)) >= 0]
        if matches:
            _, start = min(matches)
            self.stopped, self._held = True, ""
            self.decoded -= len(held) - start
            return held[:start]
        keep = 0 if last else self._possible(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def _possible(self, held: str) -> int:
        """Return the number of characters at the end that may begin a stop text: 2 for "a b##" and "###"."""
        most = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(held)), most, -1):
                if held.endswith(stop[:size]):
                    most = size
                    break
        return most
