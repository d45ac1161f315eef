"""Requests in progress, and the sessions that they belong to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from txl_runtime.errors import TxlError
from txl_runtime.sessions.requests import Event, Finished, Reason
from txl_runtime.types import Array, Ids

if TYPE_CHECKING:
    from txl_runtime.streaming.sampling import Sampler


def _nothing() -> None:
    """Do nothing: the cancel function of a request that has ended."""


class Ticket:
    """A caller's handle of an accepted request.

    Attributes:
        session: the name of its session; "" for an unnamed one, which ends with the request.
        done: whether the request has ended.
        error: the error, if it ended with reason "error".
    """

    def __init__(self, session: str, cancel: Callable[[], None], most: int | None) -> None:
        self.session, self.done = session, False
        self.error: TxlError | None = None
        self._cancel, self._most = cancel, most
        self._events: deque[Event] = deque()

    def events(self) -> list[Event]:
        """Return the events since the last call; the last event of a request is `Finished`."""
        found: list[Event] = []
        while self._events:
            found.append(self._events.popleft())
        return found

    def cancel(self) -> None:
        """End the request with reason "cancelled"; tokens fed so far stay in the state. Do nothing if it has ended."""
        self._cancel()

    @property
    def unread(self) -> int:
        """Number of unread events."""
        return len(self._events)

    @property
    def waits(self) -> bool:
        """True if the request pauses because too many events are unread."""
        return self.paused_at(len(self._events))

    def paused_at(self, unread: int) -> bool:
        """Return whether the request pauses at this number of unread events."""
        return self._most is not None and unread >= self._most

    def tell(self, event: Event) -> None:
        """Add an event."""
        self._events.append(event)

    def end(self, reason: Reason, fed: int, error: TxlError | None, seen: int = 0) -> None:
        """Add the last event, and drop the reference to the request, so that it is freed without the collector."""
        self.error, self.done, self._cancel = error, True, _nothing
        self._events.append(Finished(reason, fed, seen))


@dataclass(eq=False)
class Work:
    """A checked request.

    Attributes:
        tokens: int32 [T]; after `Job.begin`, the session's pending token comes first.
        arrays: inputs by name instead of tokens, in the table's types and with one sequence; else None.
        columns: T of the arrays.
        last, max_new_tokens, stops, until, top, score, seconds, memory_length: see `Request`.
        sampler: sampler of its tokens; None if it draws none.
    """

    tokens: Ids
    arrays: Mapping[str, Array] | None
    columns: int
    last: bool
    max_new_tokens: int
    sampler: Sampler | None
    stops: frozenset[int]
    until: Callable[[int], bool] | None
    top: int | None
    score: bool
    seconds: float | None
    memory_length: int | None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its inputs, as submitted."""
        return self.tokens.nbytes + sum(array.nbytes for array in (self.arrays or {}).values())


@dataclass(eq=False)
class Session:
    """The current condition of a session.

    Attributes:
        key: unique key of its parked state.
        name: its name; "" for a session that ends with its request.
        row: its row of the stream; None if it has none.
        fresh: whether nothing was fed yet, so that it has no state.
        pending: the last drawn token, if it was not fed yet.
        seen: number of positions fed so far.
        fill: number of memory rows of its parked state.
        version: a number that changes whenever its state does.
        served: number of the last round that served it.
        turns: number of rounds that served it since it came to its row.
        jobs: its requests in order; the first is in progress.
    """

    key: str
    name: str
    row: int | None = None
    fresh: bool = True
    pending: int | None = None
    seen: int = 0
    fill: int = 0
    version: int = 0
    served: int = 0
    turns: int = 0
    jobs: deque[Job] = field(default_factory=deque)


@dataclass(eq=False)
class Job:
    """An unfinished request.

    Attributes:
        work: the checked request.
        session: its session.
        ticket: the ticket that receives its events.
        nbytes: bytes of its inputs, as submitted.
        at: number of positions fed, including the pending token.
        drawn: number of tokens drawn.
        before: number of pending tokens before the request's own, 0 or 1.
        begun: whether `begin` was called.
    """

    work: Work
    session: Session
    ticket: Ticket
    nbytes: int
    at: int = 0
    drawn: int = 0
    before: int = 0
    begun: bool = False

    def begin(self) -> None:
        """Put the session's pending token before the tokens; call this when the job is the session's first."""
        self.begun = True
        if self.session.pending is not None:
            self.before = 1
            self.work.tokens = np.concatenate([[np.int32(self.session.pending)], self.work.tokens])
        if self.work.sampler is not None:
            self.work.sampler.read(self.work.tokens)

    @property
    def length(self) -> int:
        """Number of positions that the request feeds before it draws."""
        return len(self.work.tokens) if self.work.arrays is None else self.work.columns

    @property
    def left(self) -> int:
        """Number of positions that could be fed now: the rest of the request's, or 1, the last drawn token."""
        return max(1, self.length - self.at)

    def ids(self, count: int) -> Ids:
        """Return the next tokens to feed, at most `count`."""
        if self.at < self.length:
            return self.work.tokens[self.at : self.at + count]
        return np.array([self.session.pending], np.int32)

    def targets(self, count: int) -> Ids:
        """Return the `count` tokens that follow the next ones to feed, each one position later."""
        return self.work.tokens[self.at + 1 : self.at + 1 + count]

    def draws_after(self, count: int) -> bool:
        """Return whether a token is drawn after `count` further positions."""
        return self.drawn < self.work.max_new_tokens and self.at + count >= self.length

    def scored(self, count: int) -> int:
        """Return how many of the next `count` positions score a token of the request: all but its last."""
        return max(0, min(count, self.length - 1 - self.at)) if self.work.score else 0

    @property
    def done(self) -> bool:
        """True if nothing is left to feed or draw."""
        return self.at >= self.length and self.drawn >= self.work.max_new_tokens
