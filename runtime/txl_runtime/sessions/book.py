"""The register of sessions and their requests: it keeps names, unfinished requests and deadlines, and
enforces limits.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from weakref import ref

from txl_runtime.errors import TxlError, UsageError
from txl_runtime.sessions.jobs import Job, Session, Work
from txl_runtime.sessions.requests import Busy, Counters, Limits, Reason
from txl_runtime.sessions.session_rows import SessionRows
from txl_runtime.sessions.state import LONGEST_NAME
from txl_runtime.sessions.store import Recent, Store
from txl_runtime.streaming.checks import shown


class Book:
    """A register of sessions and their unfinished requests.

    Args:
        clock: a function that returns seconds and never goes back.

    Attributes:
        named: sessions that outlive their requests, by name.
        active: sessions that have requests, in the order in which they came.
        recent: names of sessions in the order of their last use.
        unfinished: number of requests that have not ended.
        numbers: an endless counter, from which versions are taken, so that no version repeats.
    """

    def __init__(
        self, rows: SessionRows, store: Store, limits: Limits, counters: Counters, clock: Callable[[], float]
    ) -> None:
        self._rows, self._store, self._limits, self._counters, self._clock = rows, store, limits, counters, clock
        self.named: dict[str, Session] = {}
        self.active: dict[Session, None] = {}
        self.recent, self.numbers = Recent(clock), itertools.count(1)
        self.unfinished = self._input_bytes = 0
        # weak references, so that ended requests are freed early
        self._deadlines: list[tuple[float, int, ref[Job]]] = []
        self._pace, self._ended = 1.0, clock()

    def find(self, name: object) -> Session:
        """Return the session that has a name.

        Raises:
            UsageError: no session has this name.
        """
        session = self.named.get(name) if isinstance(name, str) else None
        if session is None:
            raise UsageError(f"no session is named {shown(name)}, expected one of {len(self.named)}; see names()")
        return session

    def open(self, name: str) -> Session:
        """Return a new session; the name "" makes a session that ends with its request.

        Raises:
            Busy: the limit of named sessions, or of their bytes, is reached.
        """
        number = next(self.numbers)
        if not name:
            return Session(f"{number:0>{LONGEST_NAME + 1}}", "")  # the key is longer than any allowed name
        if self.room() < 1 or len(self.named) >= self._capacity():
            self._counters.busy += 1
            oldest = next(iter(self.recent), None)
            after = 1.0 if oldest is None else self._limits.idle_seconds - self.recent.since(oldest)
            raise Busy(
                f"there are {len(self.named)} sessions, expected fewer; close one, or come back later", max(1.0, after)
            )
        session = self.named[name] = Session(name, name, version=number)
        return session

    def check_room(self, work: Work) -> None:
        """Check that the limits leave room for a request.

        Raises:
            UsageError: the request is too large for an empty server.
            Busy: unfinished requests leave no room now.
        """
        limits = self._limits
        if work.nbytes > limits.input_bytes:
            raise UsageError(
                f"the request's inputs have {work.nbytes} bytes, expected at most {limits.input_bytes}; give them in "
                "several requests of one session"
            )
        message = None
        if self.unfinished >= len(self._rows.owners) + limits.waiting:
            most = f"{len(self._rows.owners)} rows and Limits.waiting {limits.waiting}"
            message = f"{self.unfinished} requests are unfinished, expected fewer than {most}"
        elif self._input_bytes + work.nbytes > limits.input_bytes:
            most = f"Limits.input_bytes {limits.input_bytes}"
            message = f"the inputs of unfinished requests have {self._input_bytes} bytes, expected fewer beside {most}"
        if message is not None:
            self._counters.busy += 1
            half = self._pace * self.unfinished / 2  # estimated seconds until half of the requests have ended
            raise Busy(f"{message}; come back later", min(60.0, max(1.0, half)))

    def add(self, job: Job) -> None:
        """Add a request to its session, behind the session's earlier requests."""
        session = job.session
        if not session.jobs:
            self.active[session], session.served = None, self._counters.rounds
        session.jobs.append(job)
        if session.name:
            self.recent.touch(session.name)
        if job.work.seconds is not None:
            # most entries are of requests that ended before their deadline: drop these entries
            if len(self._deadlines) > 2 * self.unfinished + 64:
                self._deadlines = [entry for entry in self._deadlines if _unfinished(entry[2]) is not None]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (self._clock() + job.work.seconds, next(self.numbers), ref(job)))
        self.unfinished += 1
        self._input_bytes += job.nbytes
        self._counters.requests += 1

    def end(self, job: Job, reason: Reason, error: TxlError | None = None) -> None:
        """End a request with a reason; do nothing if it has already ended."""
        if job.ticket.done:
            return
        session = job.session
        session.jobs.remove(job)
        self.unfinished -= 1
        self._input_bytes -= job.nbytes
        self._counters.finished[reason] += 1
        job.ticket.end(reason, job.at, error, job.session.seen)
        now = self._clock()
        self._pace += 0.1 * (min(now - self._ended, 60.0) - self._pace)
        self._ended = now
        if not session.jobs:
            del self.active[session]
            if not session.name:
                self._forget(session)
        if session.name:
            self.recent.touch(session.name)

    def end_overdue(self) -> None:
        """End requests whose deadline has passed, with reason "timeout"."""
        while self._deadlines:
            due, _, held = self._deadlines[0]
            job = _unfinished(held)
            if job is not None and due > self._clock():
                return
            heapq.heappop(self._deadlines)
            if job is not None:
                self.end(job, "timeout")

    def end_all(self) -> None:
        """End all requests with reason "closed"."""
        for session in list(self.active):
            for job in list(session.jobs):
                self.end(job, "closed")

    def drop(self, session: Session, reason: Reason, error: TxlError | None = None) -> None:
        """End a session and all its requests, for one reason."""
        for job in list(session.jobs):
            self.end(job, reason, error)
        # if the session has no row, the store counts the loss
        if reason == "error" and session.name and session.row is not None:
            self._counters.broken += 1
        self._forget(session)
        self.recent.forget(session.name)
        self.named.pop(session.name, None)

    def expire(self) -> int:
        """Close named sessions that were idle for `Limits.idle_seconds`, and return their number."""
        closed = 0
        for name in self.recent.idle(self._limits.idle_seconds):
            session = self.named[name]
            if session.jobs:
                self.recent.touch(name)
            else:
                self.drop(session, "closed")
                closed += 1
        self._counters.expired += closed
        return closed

    def due(self) -> float | None:
        """Return the seconds until the next deadline of a request or expiry of a session; None if there is neither."""
        times = [self._deadlines[0][0] - self._clock()] if self._deadlines else []
        oldest = next(iter(self.recent), None)
        if oldest is not None:
            times.append(self._limits.idle_seconds - self.recent.since(oldest))
        return max(0.0, min(times)) if times else None

    def room(self) -> int:
        """Return the number of sessions that may still begin.

        There must be room to park every session. Unnamed sessions that pause because of a slow reader are not counted,
        because they would keep all others waiting; `Limits.waiting` limits their number.
        """
        begun = (s for s in self.active if not s.name and (s.row is not None or not s.fresh))
        strangers = sum(not session.jobs[0].ticket.waits for session in begun)
        return self._capacity() + len(self._rows.owners) - len(self.named) - strangers

    def _capacity(self) -> int:
        return self._store.capacity(len(self._rows.owners))

    def _forget(self, session: Session) -> None:
        """Erase a session's state from its row and from the store."""
        self._rows.clear(session)
        self._store.drop(session.key)


def _unfinished(held: ref[Job]) -> Job | None:
    """Return the request behind a weak reference; None if the request has ended."""
    job = held()
    return None if job is None or job.ticket.done else job
