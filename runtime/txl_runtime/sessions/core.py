"""`Sessions`: more of them than a stream has rows, served by one thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from txl_runtime.errors import BackendError, TxlError, UsageError, brief, one_line
from txl_runtime.model import Model
from txl_runtime.sessions.book import Book
from txl_runtime.sessions.checkpoint import restore_sessions, save_sessions
from txl_runtime.sessions.jobs import Job, Session, Ticket, Work
from txl_runtime.sessions.request_checks import check_limits, check_request, check_row_count, check_whole
from txl_runtime.sessions.requests import Counters, Limits, Request, SessionInfo
from txl_runtime.sessions.segments import Part, Segments
from txl_runtime.sessions.session_rows import SessionRows
from txl_runtime.sessions.state import SessionState, check_name, largest_state
from txl_runtime.sessions.store import Store
from txl_runtime.sessions.turns import LATELY, Cuts, Turns, closing_up, in_order, leaver
from txl_runtime.streaming.checks import is_whole, shown

logger = logging.getLogger(__name__)


class Sessions:
    """Sessions of one model: each has a memory of its own, which outlives its requests where the session has a name.

    One thread calls this, and nothing happens but in these calls: `submit` takes a request in, `round` runs one
    segment of some sessions, and a ticket's `events` say what came of it. Where more sessions have something to do than
    the stream has rows, they take turns; what has no row is parked in host memory.

    What a session is given does not depend on the others: its tokens are cut from its request's own first one, its
    random numbers are its own, and what goes wrong in its computation ends it alone.

    Args:
        model: with independent sequences. One whose sequences run in lockstep is served one session at a time.
        rows: sequences of the stream, at most the bundle's batch size; None for as many as there can be.
        limits: on sessions, requests and bytes.
        clock: seconds, never going back.

    Attributes:
        counters: what was done so far.

    Raises:
        UsageError: the model's sequences influence one another; or rows or limits are out of range.
    """

    def __init__(
        self,
        model: Model,
        rows: int | None = None,
        limits: Limits = Limits(),  # noqa: B008 - it is frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._manifest, self._limits = model, model.manifest, check_limits(limits)
        self.rows = check_row_count(rows, model.manifest)
        stream = model.stream(self.rows)
        self.counters = Counters()
        largest = largest_state(self._manifest, self._manifest.states_of(model.update))
        self._largest = largest
        self._store = Store(self._limits, largest)
        self._rows = SessionRows(stream, self._manifest, model.update, self._store, self.counters)
        self._segments = Segments(stream, self._manifest)
        self._cuts = Cuts(self._manifest)
        self._leading = stream.loop.leading
        alone = any(entry.axes.batch is None for entry in self._manifest.interface)
        self._turns = Turns(self._cuts, alone, self._leading)
        self._newcomer = True  # whether the next row is for one that was never served
        self._book = Book(self._rows, self._store, self._limits, self.counters, clock)

    def __enter__(self) -> Sessions:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.shut()

    def __contains__(self, name: object) -> bool:
        return name in self._book.named

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request, session: str | None = None, unread: int | None = None) -> Ticket:
        """Take a request in. Everything is checked here; nothing runs before the next `round`.

        Args:
            request: what to do.
            session: the name of a session, which begins with its first request; None for one that ends with this
                request. A session's requests are served one after the other.
            unread: where so many events are unread the request pauses; None to let it go on.

        Raises:
            UsageError: the request does not fit the model or the limits, or the name is none.
            Busy: there is no room for it now.
        """
        name = "" if session is None else check_name(session)
        if unread is not None and (not is_whole(unread) or unread < 1):
            raise UsageError(f"unread is {shown(unread)}, expected a whole number of at least 1, or None")
        work = check_request(request, self._manifest, self._limits)
        found = self._book.named.get(name)
        self._check_start(work, found)
        self._book.check_room(work)
        if found is None:
            found = self._book.open(name)
        job = Job(work, found, Ticket(name, lambda: self._book.end(job, "cancelled"), unread), work.nbytes)
        self._book.add(job)
        return job.ticket

    def round(self) -> bool:
        """Run one segment for some sessions.

        Returns:
            Whether a segment ran or a request ended. False if there was nothing to do: every request has ended, or
            pauses because its events are unread, or waits until one of those goes on.
        """
        unfinished = self._book.unfinished
        self._book.end_overdue()
        self._book.expire()
        ready = [session for session in list(self._book.active) if self._goes_on(session)]
        self._mend()
        self._give_rows(ready)
        self._close_up(ready)
        self._mend()
        jobs = self._turns.together(_on_rows(ready))
        if jobs and self._cuts.size(jobs[0].left) > self._cuts.shortest:
            served = [job.session for job in jobs]
            self._close_up(served)
            self._mend()
            jobs = _on_rows(served)
        if jobs:
            self._serve([Part.of(job, self._cuts.size(job.left)) for job in jobs])
        return bool(jobs) or self._book.unfinished < unfinished

    # --- sessions ---------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Of all sessions that have one, the least recently used first."""
        return list(self._book.recent)

    def info(self, name: str) -> SessionInfo:
        """How a session stands.

        Raises:
            UsageError: there is no session of this name.
        """
        session = self._book.find(name)
        waiting = len(session.jobs)
        return SessionInfo(
            name=name,
            place="row" if session.row is not None else "new" if session.fresh else "host",
            seen=session.seen,
            fill=self._rows.fill(session),
            pending=session.pending,
            running=waiting > 0,
            waiting=max(0, waiting - 1),
            nbytes=0 if session.fresh else self._largest,
            idle_seconds=0.0 if waiting else self._book.recent.since(name),
        )

    def begin(self, name: str) -> None:
        """Begin a session that was fed nothing; one that has this name is closed before.

        Raises:
            UsageError: the name is none.
            Busy: there is no room for a session more.
        """
        name = check_name(name)
        if name in self._book.named:
            self.close(name)
        self._book.open(name)
        self._book.recent.touch(name)

    def close(self, name: str) -> None:
        """End a session and its requests, with reason "closed".

        Raises:
            UsageError: there is no session of this name.
        """
        self._book.drop(self._book.find(name), "closed")

    def cancel(self, name: str) -> int:
        """End the requests of a session with reason "cancelled"; the session stays, with what it was fed.

        Returns:
            How many.

        Raises:
            UsageError: there is no session of this name.
        """
        jobs = list(self._book.find(name).jobs)
        for job in jobs:
            self._book.end(job, "cancelled")
        return len(jobs)

    def take(self, name: str) -> SessionState:
        """A copy of a session's state. Of one that has a request it is that after the last round.

        Raises:
            UsageError: there is no session of this name.
            TxlError: its state is lost, or the engine failed.
        """
        session = self._book.find(name)
        self._mend()
        return self._rows.state(session)

    def put(self, name: str, state: SessionState) -> None:
        """Begin a session with a state, or let a session without requests go on from it.

        Raises:
            UsageError: the state does not fit the model, or the session has requests.
            Busy: there is no room for a session more.
        """
        name = check_name(name)
        if not isinstance(state, SessionState):
            raise UsageError(f"the state is a {type(state).__name__}, expected what Sessions.take returned")
        own = self._rows.checked(state)
        session = self._book.named.get(name)
        if session is not None and session.jobs:
            raise UsageError(
                f"session {brief(name)!r} has a request, expected one without; wait for its end, or close it"
            )
        session = session or self._book.open(name)
        self._rows.leave(session)
        self._store.park(session.key, own)
        session.fresh, session.pending, session.seen, session.fill = False, state.pending, state.seen, own.fill
        session.version = next(self._book.numbers)
        self._book.recent.touch(name)

    def expire(self) -> int:
        """Close sessions that nobody used for `limits.idle_seconds`; every round does so, too.

        Returns:
            How many.
        """
        return self._book.expire()

    def versions(self) -> dict[str, int]:
        """By the names of sessions, the least recently used first: a number that changes whenever the state does."""
        return {name: self._book.named[name].version for name in self._book.recent}

    def save(self, folder: str | Path) -> int:
        """Save all sessions that have names to a folder; see `Checkpoint.save`."""
        return save_sessions(self, folder, self._manifest.model_id)

    def restore(self, folder: str | Path) -> Mapping[str, TxlError]:
        """Begin all sessions that a folder holds; see `Checkpoint.restore`."""
        return restore_sessions(self, folder, self._manifest.model_id)

    def end_requests(self) -> None:
        """End all requests with reason "closed". Sessions that have names stay as they are after the last round."""
        self._book.end_all()

    def shut(self) -> None:
        """End all requests with reason "closed" and all sessions."""
        for session in [*self._book.active, *self._book.named.values()]:
            self._book.drop(session, "closed")

    # --- how things stand -------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return self._book.unfinished

    @property
    def waiting(self) -> int:
        """Requests that are on no row now: they wait for one, or behind another request of their session."""
        return self._book.unfinished - sum(session.row is not None for session in self._book.active)

    @property
    def lost(self) -> int:
        """Sessions whose memory was lost so far: by the engine, or by computing no numbers."""
        return self._store.lost + self.counters.broken

    @property
    def host_bytes(self) -> int:
        """Bytes of parked states in host memory."""
        return self._store.host_bytes

    def due(self) -> float | None:
        """Seconds until a request runs out of time or a session expires, if nothing else happens; None for never."""
        return self._book.due()

    # --- rounds -----------------------------------------------------------------------------------------------------

    def _mend(self) -> None:
        """Begin the stream anew where a state was left half replaced: what stood on its rows is lost.

        Raises:
            BackendError: the engine failed.
        """
        if self._rows.torn:
            lost = [owner for owner in self._rows.owners if owner is not None and not owner.fresh]
            self._rows.renew()
            for session in lost:
                who = f"session {brief(session.name)!r}" if session.name else "the session"
                told = f"{who} is lost, because the stream was left half changed; begin it again"
                self._store.lose(session.key, told)

    def _goes_on(self, session: Session) -> bool:
        """Whether a session's first request has something to do and is not kept from it by its reader."""
        while session.jobs:
            job = session.jobs[0]
            if not job.begun:
                try:
                    self._check_start(job.work, session, waiting=False)
                    job.begin()
                    if job.work.arrays is None:
                        check_whole(self._manifest, job.length)
                except UsageError as error:
                    self._book.end(job, "error", error)
                    continue
            return not job.ticket.waits
        return False

    def _give_rows(self, ready: list[Session]) -> None:
        """Put sessions that wait on rows."""
        waiting = in_order((session for session in ready if session.row is None), self._newcomer)
        runnable, room = set(ready), self._book.room() if waiting else 0
        for session in waiting:
            stranger = session.fresh and not session.name
            if self._rows.torn:
                return
            if stranger and room < 1:
                continue
            row = leaver(self._rows.owners, runnable)
            if row is None:
                return
            room -= stranger
            owner, self._newcomer = self._rows.owners[row], session.jobs[0].at > 0
            try:
                if owner is not None:
                    self._rows.park(owner)
                self._rows.give(session, row)
            except TxlError as error:
                if session.fresh or session.key in self._store:
                    self._book.end(session.jobs[0], "error", error)
                else:
                    self._book.drop(session, "error", error)

    def _close_up(self, some: Sequence[Session]) -> None:
        """Let some sessions stand on the first rows, where others are not computed while these run.

        One that has a single short segment to run is exchanged with nobody who ran lately: that costs more than the
        segment.
        """
        if not self._leading:
            return
        for session, row in closing_up(self._rows.owners, set(some)):
            if self._rows.torn:
                return
            owner = self._rows.owners[row]
            lately = owner is not None and self.counters.rounds - owner.served < LATELY
            if lately and self._ends_now(session.jobs[0]):
                continue
            try:
                self._rows.move(session, row)
            except TxlError as error:
                self._book.end(session.jobs[0], "error", error)

    def _ends_now(self, job: Job) -> bool:
        """Whether one more segment, one of the shortest, is all that a request needs."""
        return job.left <= self._cuts.shortest and job.drawn + 1 >= job.work.max_new_tokens

    def _serve(self, parts: list[Part]) -> None:
        """Run a segment and end the requests that are done with it."""
        try:
            self._segments.run(parts)
        except Exception as error:  # of an engine, or a fault of ours: it ends these requests and nothing else
            if not isinstance(error, TxlError):
                logger.exception("a segment failed")
                error = BackendError(f"the segment failed ({type(error).__name__}: {one_line(error)}); ask again")
            for part in parts:
                part.error = part.error or error
        finally:
            counters = self.counters
            counters.rounds += 1
            for part in parts:
                session, fed = part.job.session, part.job.at - part.first
                session.served, session.turns = counters.rounds, session.turns + 1
                if fed:
                    session.version = next(self._book.numbers)
                    counters.positions += fed
        for part in parts:
            self._settle(part)

    def _settle(self, part: Part) -> None:
        job, token = part.job, part.token
        if token is not None:
            self.counters.tokens += 1
        if part.broken:
            self._book.drop(job.session, "error", part.error)
        elif part.error is not None:
            self._book.end(job, "error", part.error)
        elif token is not None and (token in job.work.stops or self._ends(job, token)):
            self._book.end(job, "stop")
        elif job.done:
            self._book.end(job, "length")

    def _ends(self, job: Job, token: int) -> bool:
        """Whether the caller's own function ends a request at a token."""
        if job.work.until is None:
            return False
        try:
            return bool(job.work.until(token))
        except Exception as error:
            found = UsageError(f"until failed on token {token} ({type(error).__name__}: {one_line(error)}); mend it")
            self._book.end(job, "error", found)
            return True

    def _check_start(self, work: Work, session: Session | None, waiting: bool = True) -> None:
        """Hold what a request begins with against the pending token of its session, as far as that is known.

        Raises:
            UsageError: they do not go together.
        """
        pending = session is not None and session.pending is not None
        if waiting and session is not None and session.jobs:
            return  # known when it is this one's turn
        if work.arrays is not None and pending:
            raise UsageError(
                "the session has a token that was drawn and not fed yet, expected none before inputs; feed it with a "
                "request without tokens"
            )
        if work.arrays is None and not work.tokens.size and not pending:
            raise UsageError(
                "the request has no tokens and its session none that was drawn, expected at least one token"
            )


def _on_rows(sessions: Sequence[Session]) -> list[Job]:
    """The first request of each session that has one, and a row."""
    return [session.jobs[0] for session in sessions if session.row is not None and session.jobs]
