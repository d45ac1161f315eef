"""Turn the runtime's events into one text of a completion, its log-probabilities and its finish reason.

Log-probabilities have the form of OpenAI's completions: four lists of the same length, `tokens`, `token_logprobs`,
`top_logprobs` and `text_offset`, with null for a token without a predecessor. With `return_token_ids` there are two
more lists: `token_ids`, and `top_token_ids`, the ids of the names in `top_logprobs`. The lists are kept as JSON, which
takes a tenth of the memory that Python's numbers would take.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
from msgspec import Raw
from txl_runtime.sessions import Event, Finished, Prompt, Token
from txl_runtime.streaming.texts import TextStream, TokenTexts
from txl_runtime.types import Ids

from txl_deploy.serve.orders import Order

COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
"""Names of the lists of log-probabilities, as in OpenAI's completions."""
ID_COLUMNS = ("token_ids", "top_token_ids")
"""Columns that `return_token_ids` adds."""


class Columns:
    """A collector of log-probabilities, one entry per token, as JSON.

    Args:
        ids: True if entries also hold token ids.
    """

    def __init__(self, ids: bool = False) -> None:
        self._parts: dict[str, list[bytes]] = {name: [] for name in COLUMNS + (ID_COLUMNS if ids else ())}

    def __bool__(self) -> bool:
        return bool(self._parts["tokens"])

    def add(self, entries: Sequence[tuple[object, ...]]) -> None:
        """Add entries: tuples with a value for each column, e.g. (token, log-probability, most probable, offset)."""
        if entries:
            for part, column in zip(self._parts.values(), zip(*entries, strict=True), strict=True):
                part.append(msgspec.json.encode(column)[1:-1])

    def document(self) -> dict[str, Raw]:
        """Return all entries so far, as one JSON list for each column."""
        return {name: Raw(b"[" + b",".join(part) + b"]") for name, part in self._parts.items()}


class Choice:
    """One text of an answer.

    Attributes:
        fed: number of tokens of the prompt.
        drawn: number of tokens generated.
        seen: number of positions that the session has read in all; set when the text has ended.
        ended: the runtime's reason why the text ended; "" while it runs.
        reason: "stop" or "length" if the text is complete; else "".
    """

    def __init__(self, order: Order, prompt: Ids, pieces: TokenTexts) -> None:
        self._prompt, self._pieces, self._logprobs, self._ids = prompt, pieces, order.logprobs, order.ids
        self._text, self._stop_tokens = TextStream(order.stops), frozenset(order.stop_tokens)
        self._ready: list[str] = []
        self._sent = 0  # number of characters of the answer that later tokens cannot change
        self._entries: deque[tuple[int, tuple[object, ...]]] = deque()  # entries to return: (offset, columns)
        self._echoed = len(prompt)
        self.fed, self.drawn, self.seen = len(prompt), 0, 0
        self.ended = self.reason = ""
        if order.echo:
            self._echoed = 0
            if order.logprobs is None:
                self._echo(len(prompt))

    def take(self, event: Event) -> None:
        """Process the next event of the runtime."""
        if isinstance(event, Token):
            self._echo(len(self._prompt))
            self._draw(event)
        elif isinstance(event, Prompt) and self._logprobs is not None:
            self._echo(event.first)
            self._score(event)
        elif isinstance(event, Finished):
            self._echo(len(self._prompt))
            self.ended, self.seen = event.reason, event.seen
            self._certain(self._text.finish())
            self.reason = "stop" if self._text.stopped else event.reason if event.reason in ("stop", "length") else ""

    def part(self, columns: Columns) -> str:
        """Return the text that became final since the last call, and add its tokens' entries to `columns`."""
        text = "".join(self._ready)
        self._ready.clear()
        whole = bool(self.ended) and not self._text.stopped
        entries = []
        while self._entries and (whole or self._entries[0][0] < self._sent):
            entries.append(self._entries.popleft()[1])
        columns.add(entries)
        return text

    def _certain(self, text: str) -> None:
        if text:
            self._ready.append(text)
            self._sent += len(text)

    def _echo(self, upto: int) -> None:
        """Echo the prompt's tokens before index `upto` that are not echoed yet, with null as log-probability."""
        for token in self._prompt[self._echoed : upto].tolist():
            self._entry(token, None)
            self._certain(self._text.echo(self._pieces.bytes_of(token)))
        self._echoed = max(self._echoed, upto)

    def _score(self, event: Prompt) -> None:
        tokens = self._prompt[event.first : event.first + len(event.logprobs)].tolist()
        for place, (token, own) in enumerate(zip(tokens, event.logprobs.tolist(), strict=True)):
            best = zip(event.top_ids[place].tolist(), event.top_logprobs[place].tolist(), strict=True)
            self._entry(token, own, [(token, own), *best])
            self._certain(self._text.echo(self._pieces.bytes_of(token)))
        self._echoed = event.first + len(tokens)

    def _draw(self, event: Token) -> None:
        self.drawn += 1
        if self._text.stopped or event.id in self._stop_tokens:
            return
        if event.logprob is not None:
            self._entry(event.id, event.logprob, [(event.id, event.logprob), *event.top])
        self._certain(self._text.feed(self._pieces.bytes_of(event.id)))

    def _entry(self, token: int, logprob: float | None, best: Sequence[tuple[int, float]] | None = None) -> None:
        """Add a token's entry: its log-probability, and by name the log-probabilities of the tokens in `best`.

        If two tokens have the same name, the more probable token is kept. A token without a log-probability has null.
        """
        if self._logprobs is None:
            return
        entries: dict[str, tuple[float, int]] = {}
        for other, value in (best or ()) if self._logprobs else ():
            name = self._pieces.name(other)
            entries[name] = max((value, other), entries.get(name, (value, other)), key=lambda pair: pair[0])
        top = None if best is None else {name: value for name, (value, _) in entries.items()}
        where = self._text.decoded
        columns: tuple[object, ...] = (self._pieces.name(token), logprob, top, where)
        if self._ids:
            columns = (*columns, token, None if best is None else {name: other for name, (_, other) in entries.items()})
        self._entries.append((where, columns))
