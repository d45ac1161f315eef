"""What `Stream.generate` returns, and where its sequences end: at a stop token, a stop text, or the last token."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from txl_runtime.bundle.vocabulary import Vocabulary
from txl_runtime.errors import UsageError
from txl_runtime.streaming.texts import TextStream, TokenTexts
from txl_runtime.types import Floats, Ids


class Generation(Generator[Ids, None, None]):
    """Tokens int32 [b] that are drawn one by one: an iterator, or by `texts` what they stand for."""

    def __init__(self, drawn: Generator[Ids, None, None], ends: Ends) -> None:
        self._drawn, self._ends = drawn, ends

    def send(self, value: None) -> Ids:
        """The next tokens, as `next` gives them."""
        return self._drawn.send(value)

    def throw(self, kind: Any, value: Any = None, at: Any = None, /) -> Ids:
        """End it with an error; what was fed stays fed."""
        return self._drawn.throw(kind if value is None else value)

    @property
    def logprobs(self) -> Floats | None:
        """Of the tokens that came last, float32 [b]: natural log-probabilities before temperature, top-k and top-p.

        0 where a sequence had stopped before; None before the first token, and where they were not asked for.
        """
        return self._ends.logprobs

    def texts(self) -> Iterator[tuple[str, ...]]:
        """The same tokens as text: what each of them makes certain, a str for each of b sequences.

        Unfinished characters, and what may become a stop text, are held back until a sequence's last token. A stop text
        and what stands behind it are left out, and so is a stop token. What is no UTF-8 becomes U+FFFD.

        Raises:
            UsageError: at once, where the bundle has no vocabulary.
        """
        self._ends.read()
        return (self._ends.said for _ in self)

    def finish(self) -> tuple[str, ...]:
        """End it here, and return what `texts` still holds back, a str for each of b sequences.

        No token comes any more. A sequence's last token has brought everything, so this is for who leaves early.

        Raises:
            UsageError: the bundle has no vocabulary.
        """
        self.close()
        return self._ends.rest()


class Ends:
    """Where b sequences end, at a stop token or a stop text; and what is told of them on the way there.

    Attributes:
        logprobs, said: of the tokens that came last; see `Generation`.
    """

    def __init__(
        self, b: int, tokens: frozenset[int], texts: tuple[str, ...], vocabulary: Callable[[], Vocabulary | None]
    ) -> None:
        self._b, self._ids, self._stops, self._vocabulary = b, list(tokens), texts, vocabulary
        self._texts: list[TextStream] = []
        self.logprobs: Floats | None = None
        self.said: tuple[str, ...] = ()
        if texts:
            self.read()

    def read(self) -> None:
        """Read tokens as text from the next one on.

        Raises:
            UsageError: the bundle has no vocabulary.
        """
        if self._texts:
            return
        vocabulary = self._vocabulary()
        if vocabulary is None:
            raise UsageError(
                "the bundle has no vocabulary to read tokens as text, expected one; use token ids and stop_tokens, or "
                "export with --vocabulary FILE"
            )
        self._pieces, self._texts = TokenTexts(vocabulary), [TextStream(self._stops) for _ in range(self._b)]

    def rest(self) -> tuple[str, ...]:
        """What is held back of each sequence; see `Generation.finish`."""
        self.read()
        return tuple(text.finish() for text in self._texts)

    def take(self, tokens: Ids, running: NDArray[np.bool_], last: bool) -> None:
        """A token of each sequence that is running; a sequence that ends with it is marked as not running."""
        if not self._ids and not self._texts:
            return
        ended, said = np.isin(tokens, self._ids), [""] * len(self._texts)
        for row, text in enumerate(self._texts):
            if running[row]:
                if not ended[row]:
                    said[row] = text.feed(self._pieces.bytes_of(int(tokens[row])))
                    ended[row] = text.stopped
                if last or ended[row]:
                    said[row] += text.finish()
        running &= ~ended
        self.said = tuple(said)
