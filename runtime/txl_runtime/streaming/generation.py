"""The iterator that `Stream.generate` returns, and the check for a sequence's end: stop token, stop text or
last token.
"""

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
    """An iterator of drawn tokens, int32 [b] each; its method `texts` iterates over text instead."""

    def __init__(self, drawn: Generator[Ids, None, None], ends: Ends) -> None:
        self._drawn, self._ends = drawn, ends

    def send(self, value: None) -> Ids:
        """Return the next tokens, as `next` does. For example, [17, 4] for two sequences."""
        return self._drawn.send(value)

    def throw(self, kind: Any, value: Any = None, at: Any = None, /) -> Ids:
        """Raise an error inside the generator, which ends the generation. If 3 of 10 tokens were fed, the state keeps
        these 3 tokens.
        """
        return self._drawn.throw(kind if value is None else value)

    @property
    def logprobs(self) -> Floats | None:
        """Natural log-probabilities of the latest tokens, float32 [b].

        The values are the model's own, before `datastore`, `adjust`, `logit_bias`, `allow`, `forbid` and temperature. A
        sequence that had already stopped has 0. The property is None before the first token, and without
        `generate(logprobs=True)`.
        """
        return self._ends.logprobs

    def texts(self) -> Iterator[tuple[str, ...]]:
        """Iterate over the generated text: with each token, a tuple of b str, the text that the token completes.

        Unfinished characters, and text that may become a stop text, are held back until a sequence's last token. A stop
        text, any text after it, and a stop token are left out. Bytes that are no UTF-8 become U+FFFD.

        Raises:
            UsageError: the bundle has no vocabulary; raised by this call, not while iterating.
        """
        self._ends.read()
        return (self._ends.said for _ in self)

    def finish(self) -> tuple[str, ...]:
        """End the generation, and return the text that `texts` still holds back, one str for each of b sequences.

        Only a caller that stops early needs this call: with a sequence's last token, `texts` yields all its text.

        Raises:
            UsageError: the bundle has no vocabulary.
        """
        self.close()
        return self._ends.rest()


class Ends:
    """A detector of the ends of b sequences, by stop token or stop text, which also keeps the latest tokens' text.

    Attributes:
        logprobs: log-probabilities of the latest tokens; see `Generation.logprobs`.
        said: text that the latest tokens completed; see `Generation.texts`.
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
        """Start converting tokens to text, beginning with the next token.

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
        """Return the text that is still held back, one str per sequence; see `Generation.finish`."""
        self.read()
        return tuple(text.finish() for text in self._texts)

    def take(self, tokens: Ids, running: NDArray[np.bool_], last: bool) -> None:
        """Process one token [b] per running sequence; set running [b] to False for each sequence that ends.

        For example, tokens [17, 4] with `running` [True, False] process token 17 for sequence 0.

        Args:
            last: True if these are the last tokens: no text is held back then.
        """
        if not self._ids and not self._texts:
            return
        ended, texts = np.isin(tokens, self._ids), [""] * len(self._texts)
        for row, text in enumerate(self._texts):
            if running[row]:
                if not ended[row]:
                    texts[row] = text.feed(self._pieces.bytes_of(int(tokens[row])))
                    ended[row] = text.stopped
                if last or ended[row]:
                    texts[row] += text.finish()
        running &= ~ended
        self.said = tuple(texts)
