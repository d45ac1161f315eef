"""Requests that are being served, and the sessions that they belong to."""

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
    """What cancels a request that has ended."""


class Ticket:
    """What a caller holds of a request that was taken in.

    Attributes:
        session: the name of its session; "" where it has one of its own that ends with it.
        done: whether it has ended.
        error: why it ended with reason "error".
    """

    def __init__(self, session: str, cancel: Callable[[], None], most: int | None) -> None:
        self.session, self.done = session, False
        self.error: TxlError | None = None
        self._cancel, self._most = cancel, most
        self._events: deque[Event] = deque()

    def events(self) -> list[Event]:
        """What came since the last call; the last event of all is `Finished`."""
        found: list[Event] = []
        while self._events:
            found.append(self._events.popleft())
        return found

    def cancel(self) -> None:
        """End the request with reason "cancelled". What was fed stays fed. Once it is done this does nothing."""
        self._cancel()

    @property
    def unread(self) -> int:
        """Events that were not read yet."""
        return len(self._events)

    @property
    def waits(self) -> bool:
        """Whether so many events are unread that the request pauses."""
        return self.paused_at(len(self._events))

    def paused_at(self, unread: int) -> bool:
        """Whether the request pauses, or has paused, where so many events are unread."""
        return self._most is not None and unread >= self._most

    def tell(self, event: Event) -> None:
        """Add an event."""
        self._events.append(event)

    def end(self, reason: Reason, fed: int, error: TxlError | None, seen: int = 0) -> None:
        """Add the last event. From then on nothing holds the request, whose memory is free without the collector."""
        self.error, self.done, self._cancel = error, True, _nothing
        self._events.append(Finished(reason, fed, seen))


@dataclass(eq=False)
class Work:
    """A request, checked: what it feeds and what it gives back.

    Attributes:
        tokens: int32 [T]; once the work has begun, with the token that was pending before it.
        arrays: in place of tokens, in the table's types and with one sequence.
        columns: T of the arrays.
        last, max_new_tokens, stops, until, top, score, seconds, memory_length: see `Request`.
        sampler: draws its tokens; None where none are.
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
        """Bytes of its inputs, as they were submitted."""
        return self.tokens.nbytes + sum(array.nbytes for array in (self.arrays or {}).values())


@dataclass(eq=False)
class Session:
    """A session as it stands.

    Attributes:
        key: what its state is parked under; no two sessions have the same.
        name: "" of a session that ends with its request.
        row: of the stream; None where it has none.
        fresh: whether nothing was ever fed, so that it has no state anywhere.
        pending: the token that was drawn last and not fed yet.
        seen: positions that were fed in all.
        fill: memory rows of its state where that is parked.
        version: changes whenever its state does.
        served: the number of the round that served it last.
        turns: rounds that served it since it came to its row.
        jobs: its requests, the one that is being served first.
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
    """A request that is unfinished.

    Attributes:
        work: what is to be done.
        session: whose request it is.
        ticket: where events go.
        nbytes: of its inputs, as they were submitted.
        at: positions that were fed; of tokens, the pending one among them.
        drawn: tokens that were drawn.
        before: tokens that stood pending before the request's own, 0 or 1.
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
        """Let the session's pending token be the first of the tokens; the job is the session's first now."""
        self.begun = True
        if self.session.pending is not None:
            self.before = 1
            self.work.tokens = np.concatenate([[np.int32(self.session.pending)], self.work.tokens])

    @property
    def length(self) -> int:
        """Positions that are given, before anything is drawn."""
        return len(self.work.tokens) if self.work.arrays is None else self.work.columns

    @property
    def left(self) -> int:
        """Positions that could be fed now: the rest of what was given, or the token that was drawn last."""
        return max(1, self.length - self.at)

    def ids(self, count: int) -> Ids:
        """The tokens that are fed next."""
        if self.at < self.length:
            return self.work.tokens[self.at : self.at + count]
        return np.array([self.session.pending], np.int32)

    def targets(self, count: int) -> Ids:
        """The tokens that follow the ones that are fed next."""
        return self.work.tokens[self.at + 1 : self.at + 1 + count]

    def draws_after(self, count: int) -> bool:
        """Whether a token is drawn once so many positions more are fed."""
        return self.drawn < self.work.max_new_tokens and self.at + count >= self.length

    def scored(self, count: int) -> int:
        """How many of the request's tokens the next so many positions tell the log-probabilities of."""
        return max(0, min(count, self.length - 1 - self.at)) if self.work.score else 0

    @property
    def done(self) -> bool:
        """Whether there is nothing left to feed or draw."""
        return self.at >= self.length and self.drawn >= self.work.max_new_tokens
