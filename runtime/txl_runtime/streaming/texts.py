r"""Text to tokens; and from tokens to text, piece by piece: unfinished characters and what may become a stop text are
held back.

A text is what its tokens' bytes are in UTF-8. What is no UTF-8 becomes U+FFFD in a text; as a token of its own it is
called `bytes:\xff`.
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
    """Texts as tokens int32 [b, T], and how many of them count, int32 [b]. A text alone is one sequence.

    Raises:
        UsageError: there is no vocabulary, it cannot encode a text, lengths are given besides, or the texts are not b.
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
    """Sequences [t] side by side, int32 [b, T] with zeros behind those that are shorter; and their lengths [b]."""
    lengths = np.array([len(ids) for ids in sequences], np.int32)
    found = np.zeros((len(sequences), int(lengths.max(initial=0))), np.int32)
    for row, ids in zip(found, sequences, strict=True):
        row[: len(ids)] = ids
    return found, lengths


class TokenTexts:
    """What each token stands for, looked up once."""

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self._vocabulary = vocabulary
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, str] = {}

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token; of a model without a vocabulary, its id and a space."""
        found = self._bytes.get(token)
        if found is None:
            found = f"{token} ".encode() if self._vocabulary is None else self._vocabulary.decode([token])
            self._bytes[token] = found
        return found

    def name(self, token: int) -> str:
        """A token as clients are shown it."""
        found = self._names.get(token)
        if found is None:
            data = self.bytes_of(token)
            try:
                found = data.decode()
            except UnicodeDecodeError:
                found = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._names[token] = found
        return found


def check_stop_texts(stop_texts: object, what: str = "stop_texts") -> tuple[str, ...]:
    """Texts that end a sequence; a str is one of them.

    Raises:
        UsageError: it is something else, or one of them is empty.
    """
    found: Any = (stop_texts,) if isinstance(stop_texts, str) else stop_texts
    listed = isinstance(found, list | tuple) and len(found) <= MOST_NAMED
    if not listed or not all(isinstance(text, str) and text for text in found):
        raise UsageError(f"{what} is {shown(stop_texts)}, expected a list of texts of at least one character each")
    return tuple(found)


class TextStream:
    """The text of tokens that come one by one.

    A text ends before the stop text whose end comes first; of several with the same end, before the longest. So it does
    not matter in what pieces a text comes.

    Args:
        stops: the stop texts; a str is one of them.

    Attributes:
        decoded: characters so far, held ones included and those behind a stop text not: where the next token begins.
        stopped: whether a stop text has come; nothing counts after it.

    Raises:
        UsageError: the stop texts are something else, or one of them is empty.
    """

    def __init__(self, stops: str | Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops, self._held = check_stop_texts(stops, "stops"), ""
        self.decoded, self.stopped = 0, False

    def echo(self, piece: bytes) -> str:
        """Text that stands before what is generated, and stops nothing."""
        text = self._decoder.decode(piece)
        self.decoded += len(text)
        return text

    def feed(self, piece: bytes) -> str:
        """The bytes of a token in, text that is certain out."""
        return "" if self.stopped else self._more(self._decoder.decode(piece), last=False)

    def finish(self) -> str:
        """What was held back, once nothing more comes."""
        return "" if self.stopped else self._more(self._decoder.decode(b"", final=True), last=True)

    def _more(self, text: str, last: bool) -> str:
        self.decoded += len(text)
        held = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := held.find(stop)) >= 0]
        if found:
            _, start = min(found)
            self.stopped, self._held = True, ""
            self.decoded -= len(held) - start
            return held[:start]
        keep = 0 if last else self._possible(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def _possible(self, held: str) -> int:
        """How many characters at the end may be the begin of a stop text."""
        most = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(held)), most, -1):
                if held.endswith(stop[:size]):
                    most = size
                    break
        return most
