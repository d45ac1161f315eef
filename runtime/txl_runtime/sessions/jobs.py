"""Requests in progress, the sessions that they belong to, and their parts of a segment."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from txl_runtime.errors import BackendError, TxlError, UsageError, brief, one_line
from txl_runtime.sessions.requests import Event, Finished, Reason
from txl_runtime.types import Array, Ids

if TYPE_CHECKING:
    from txl_runtime.streaming.sampling import Sampler


def _nothing() -> None:
    """Do nothing: the cancel function of a request that has ended."""


class Ticket:
    """A caller's handle of an accepted request.

    Attributes:
        session: the name of the request's session; "" for an unnamed session, which ends with the request.
        done: whether the request has ended.
        error: the error, if the request ended with reason "error"; else None.
    """

    def __init__(self, session: str, cancel: Callable[[], None], most: int | None) -> None:
        self.session, self.done = session, False
        self.error: TxlError | None = None
        self._cancel, self._most = cancel, most
        self._events: deque[Event] = deque()

    def events(self) -> list[Event]:
        """Return the events since the last call; the last event of a request is `Finished`."""
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def cancel(self) -> None:
        """End the request with reason "cancelled", unless it has ended; tokens fed so far stay in the state."""
        self._cancel()

    @property
    def unread(self) -> int:
        """The number of events that the reader has not fetched."""
        return len(self._events)

    @property
    def waits(self) -> bool:
        """True if the request is paused because too many events are unread."""
        return self.paused_at(len(self._events))

    def paused_at(self, unread: int) -> bool:
        """Return whether the request pauses when it has this number of unread events."""
        return self._most is not None and unread >= self._most

    def tell(self, event: Event) -> None:
        """Add an event for the reader."""
        self._events.append(event)

    def end(self, reason: Reason, fed: int, error: TxlError | None, seen: int = 0) -> None:
        """Add the event `Finished`, and drop the reference to the request so that it is freed at once."""
        self.error, self.done, self._cancel = error, True, _nothing
        self._events.append(Finished(reason, fed, seen))


@dataclass(eq=False)
class Work:
    """A checked request.

    Attributes:
        tokens: int32 [T]; `Job.begin` puts the session's pending token in front.
        arrays: inputs by name for one sequence, in the declared types; None if the request has tokens.
        columns: number of positions T of the arrays.
        last, max_new_tokens, stops, until, top, score, seconds, memory_length: see `Request`.
        sampler: the sampler of the request's tokens; None if the request draws no token.
        draft: maximum number of tokens of a draft; 0 for no drafts.
    """

    tokens: Ids
    arrays: Mapping[str, Array] | None
    columns: int
    last: bool
    max_new_tokens: int
    sampler: Sampler | None
    draft: int
    stops: frozenset[int]
    until: Callable[[int], bool] | None
    top: int | None
    score: bool
    seconds: float | None
    memory_length: int | None

    @cached_property
    def nbytes(self) -> int:
        """The number of bytes of the inputs as submitted."""
        return self.tokens.nbytes + sum(array.nbytes for array in (self.arrays or {}).values())


@dataclass(eq=False)
class Session:
    """The state of affairs of one session: its row, its requests, and how far it has read.

    Attributes:
        key: unique key of the session's parked state.
        name: the session's name; "" for a session that ends with its request.
        row: the session's row of the stream; None if it has no row.
        fresh: True before the first position is fed: the session has no state yet.
        pending: the last drawn token, if it was not fed yet; else None.
        seen: number of positions fed so far.
        fill: number of memory rows of the parked state.
        version: a number that changes whenever the session's state changes.
        served: number of the last round in which the session ran.
        turns: number of rounds in which the session ran since it got its row.
        jobs: the session's requests in order; the first is in progress.
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
        session: the session that the request belongs to.
        ticket: the ticket that receives the request's events.
        nbytes: number of bytes of the inputs as submitted.
        at: number of positions fed, including the pending token.
        drawn: number of tokens drawn.
        before: 1 if the session's pending token was put before the request's own tokens, else 0.
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
        """Put the session's pending token before the request's tokens; called when the job becomes the
        session's first.
        """
        self.begun = True
        if self.session.pending is not None:
            self.before = 1
            self.work.tokens = np.concatenate([[np.int32(self.session.pending)], self.work.tokens])
        if self.work.sampler is not None:
            self.work.sampler.read(self.work.tokens)

    @property
    def length(self) -> int:
        """The number of positions that the request feeds before it draws."""
        return len(self.work.tokens) if self.work.arrays is None else self.work.columns

    @property
    def positions_left(self) -> int:
        """The number of positions that are left to feed: of the request's own, or 1 for the token drawn last."""
        return max(1, self.length - self.at)

    def ids(self, count: int) -> Ids:
        """Return the next tokens to feed, at most `count`.

        For example, [5, 9] of the tokens [5, 9, 2] if `count` is 2.
        """
        if self.at < self.length:
            return self.work.tokens[self.at : self.at + count]
        return np.array([self.session.pending], np.int32)

    def targets(self, count: int) -> Ids:
        """Return the `count` tokens that the next `count` positions predict: each follows its position by one.

        For example, [9, 2] of the tokens [5, 9, 2].
        """
        return self.work.tokens[self.at + 1 : self.at + 1 + count]

    def draws_after(self, count: int) -> bool:
        """Return whether a token is drawn once `count` further positions were fed."""
        return self.drawn < self.work.max_new_tokens and self.at + count >= self.length

    def scored(self, count: int) -> int:
        """Return how many of the next `count` positions are followed by a token of the request that is scored."""
        return max(0, min(count, self.length - 1 - self.at)) if self.work.score else 0

    @property
    def done(self) -> bool:
        """True if nothing is left to feed or draw."""
        return self.at >= self.length and self.drawn >= self.work.max_new_tokens


@dataclass(eq=False)
class Part:
    """A job's share of one segment, and the results for this job.

    Attributes:
        job: a job whose session has a row.
        row: the session's row of the stream.
        size: number of positions that the job feeds in this segment.
        first: number of positions that the job fed before this segment.
        scored: number of prompt tokens that are scored in this segment.
        draft: predicted tokens that are fed after the job's one position; tokens that are drawn as predicted are kept.
        drawn: the drawn tokens.
        error: an error that concerns only this job; else None.
        broken: True if the job computed NaN: its session has to be closed.
    """

    job: Job
    row: int
    size: int
    first: int
    scored: int
    draft: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    error: TxlError | None = None
    broken: bool = False
    _asked: int = 0  # number of drawn tokens that `ends` has checked
    _ends: bool = False

    @classmethod
    def of(cls, job: Job, size: int) -> Part:
        """Return a part with the next `size` positions of a job."""
        assert job.session.row is not None
        return cls(job, job.session.row, size, job.at, job.scored(size))

    @property
    def fed(self) -> int:
        """The number of positions of this part that are committed to the state."""
        return self.job.at - self.first

    @property
    def interrupted(self) -> bool:
        """True if a draw was interrupted, so that the number of drawn tokens does not fit the positions that were
        fed.
        """
        drawing = self.job.at - max(self.first, self.job.length - 1) if self.job.work.max_new_tokens else 0
        return len(self.drawn) != max(0, drawing)

    def ends(self) -> bool:
        """Return True if the latest token ends the request, or the caller's `until` raises; `until` is called once per
        token.
        """
        asked, self._asked = self._asked, len(self.drawn)
        if asked < len(self.drawn):
            token, work = self.drawn[-1], self.job.work
            try:
                self._ends = token in work.stops or (work.until is not None and bool(work.until(token)))
            except Exception as error:
                message = f"until failed on token {token} ({type(error).__name__}: {one_line(error)}); mend it"
                self.error, self._ends = UsageError(message), True
        return self._ends

    def goes_on(self) -> bool:
        """Return True if the draft predicted the latest token, and the request would feed this token next."""
        count = len(self.drawn)
        follows = self.error is None and count <= len(self.draft) and self.drawn[-1] == self.draft[count - 1]
        return follows and not self.ends() and not self.job.ticket.waits

    def fail(self, error: TxlError, broken: bool) -> None:
        """Set an error that concerns only this job; `broken` is True if the job computed NaN."""
        if broken:
            name = self.job.session.name
            who = f"session {brief(name)!r}" if name else "the session"
            error = BackendError(f"{who} produced NaN, expected log-probabilities; it was closed, begin it again")
        self.error, self.broken = error, broken
