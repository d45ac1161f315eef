"""The class `Sessions`, in which one thread serves any number of sessions on a stream's rows."""

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
from txl_runtime.sessions.jobs import Job, Part, Session, Ticket, Work
from txl_runtime.sessions.request_checks import check_limits, check_request, check_row_count, check_whole
from txl_runtime.sessions.requests import Counters, Limits, Request, SessionInfo
from txl_runtime.sessions.segments import Segments
from txl_runtime.sessions.session_rows import SessionRows
from txl_runtime.sessions.state import SessionState, check_name, largest_state
from txl_runtime.sessions.store import Store
from txl_runtime.sessions.turns import LATELY, Cuts, Turns, closing_up, in_order, leaver
from txl_runtime.streaming.checks import is_whole, shown

logger = logging.getLogger(__name__)


class Sessions:
    """The sessions of one model. Each has a memory of its own; the memory of a named session outlives its requests.

    One thread makes all calls, and nothing runs between them: `submit` accepts a request, `round` runs one segment of
    some sessions, and a ticket's `events` returns the results. If more sessions have work than the stream has rows,
    they take turns; the state of a session without a row is parked in host memory.

    A session's results do not depend on other sessions: segments are counted from its request's first token, it has its
    own random numbers, and an error in its computation ends only this session.

    Args:
        model: a model whose sequences do not influence one another. In lockstep, one session is served at a time.
        rows: number of the stream's sequences, at most the bundle's batch size; None for the largest possible number.
        limits: limits on sessions, requests and bytes.
        clock: a function that returns seconds and never goes back.

    Attributes:
        counters: counts of rounds, tokens, requests and so on since the object was made.
        rows: number of the stream's sequences.

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
        self._leading, self._parts = stream.loop.leading, stream.loop.parts
        alone = any(entry.axes.batch is None for entry in self._manifest.interface)
        self._turns = Turns(self._cuts, alone, self._leading)
        self._newcomer = True  # True if the next row goes to a request that was never served
        self._book = Book(self._rows, self._store, self._limits, self.counters, clock)

    def __enter__(self) -> Sessions:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.shut()

    def __contains__(self, name: object) -> bool:
        return name in self._book.named

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request, session: str | None = None, unread: int | None = None) -> Ticket:
        """Check and accept a request; nothing runs before the next `round`.

        Args:
            request: the request.
            session: the name of a session, which its first request begins; None for a session without a name, which
                ends with this request. A session's requests are served one after the other.
            unread: number of unread events at which the request pauses; None for no pause.

        Raises:
            UsageError: the request does not fit the model or the limits, or the name is not valid.
            Busy: a limit is reached; try again later.
        """
        name = "" if session is None else check_name(session)
        if unread is not None and (not is_whole(unread) or unread < 1):
            raise UsageError(f"unread is {shown(unread)}, expected a whole number of at least 1, or None")
        work = check_request(request, self._manifest, self._limits, self._parts)
        known = self._book.named.get(name)
        self._check_start(work, known)
        self._book.check_room(work)
        if known is None:
            known = self._book.open(name)
        job = Job(work, known, Ticket(name, lambda: self._book.end(job, "cancelled"), unread), work.nbytes)
        self._book.add(job)
        return job.ticket

    def round(self) -> bool:
        """Run one segment for some of the sessions that have work.

        Returns:
            True if a segment ran or a request ended. False if there was nothing to do: every request has ended, is
            paused because its events are unread, or waits for a paused request of its session.
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
        if jobs and self._cuts.size(jobs[0].positions_left) > self._cuts.shortest:
            served = [job.session for job in jobs]
            self._close_up(served)
            self._mend()
            jobs = _on_rows(served)
        if jobs:
            self._serve([Part.of(job, self._cuts.size(job.positions_left)) for job in jobs])
        return bool(jobs) or self._book.unfinished < unfinished

    # --- sessions ---------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of all named sessions, the least recently used first."""
        return list(self._book.recent)

    def info(self, name: str) -> SessionInfo:
        """Return the place of a session's state, its sizes and its counts.

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
        """Begin an empty session; an existing session of this name is closed first.

        Raises:
            UsageError: the name is not valid.
            Busy: the limit of sessions is reached.
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
        """End the requests of a session with reason "cancelled"; the session keeps its state.

        Returns:
            The number of requests that were ended.

        Raises:
            UsageError: there is no session of this name.
        """
        jobs = list(self._book.find(name).jobs)
        for job in jobs:
            self._book.end(job, "cancelled")
        return len(jobs)

    def take(self, name: str) -> SessionState:
        """Return a copy of a session's state after the last round.

        Raises:
            UsageError: there is no session of this name.
            TxlError: the session's state is lost, or the engine failed.
        """
        session = self._book.find(name)
        self._mend()
        return self._rows.state(session)

    def put(self, name: str, state: SessionState) -> None:
        """Begin a session with a state, or let a session without requests go on from it.

        Raises:
            UsageError: the state does not fit the model, or the session has requests.
            Busy: the limit of sessions is reached.
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
        """Close sessions that were idle for `limits.idle_seconds`; return their number. `round` calls this, too."""
        return self._book.expire()

    def versions(self) -> dict[str, int]:
        """Return each named session's version, the least recently used first; it changes whenever the session's state
        changes.
        """
        return {name: self._book.named[name].version for name in self._book.recent}

    def save(self, folder: str | Path) -> int:
        """Save all named sessions to a folder; see `Checkpoint.save`."""
        return save_sessions(self, folder, self._manifest.model_id)

    def restore(self, folder: str | Path) -> Mapping[str, TxlError]:
        """Begin all sessions in a folder; see `Checkpoint.restore`."""
        return restore_sessions(self, folder, self._manifest.model_id)

    def end_requests(self) -> None:
        """End all requests with reason "closed"; named sessions keep their state."""
        self._book.end_all()

    def shut(self) -> None:
        """End all requests with reason "closed", and then all sessions."""
        for session in [*self._book.active, *self._book.named.values()]:
            self._book.drop(session, "closed")

    # --- status -------------------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """The number of requests that have not ended."""
        return self._book.unfinished

    @property
    def waiting(self) -> int:
        """The number of requests without a row: they wait for a row, or for an earlier request of their session."""
        return self._book.unfinished - sum(session.row is not None for session in self._book.active)

    @property
    def lost(self) -> int:
        """The number of sessions whose memory was lost so far, because the engine failed or computed NaN."""
        return self._store.lost + self.counters.broken

    @property
    def host_bytes(self) -> int:
        """The number of bytes of parked states in host memory."""
        return self._store.host_bytes

    def due(self) -> float | None:
        """Return the seconds until the next deadline of a request or expiry of a session; None if there is neither."""
        return self._book.due()

    # --- rounds -----------------------------------------------------------------------------------------------------

    def _mend(self) -> None:
        """Reset the stream if an interrupt left a state half replaced; the states on all rows are then lost.

        Raises:
            BackendError: the engine failed.
        """
        if self._rows.torn:
            lost = [owner for owner in self._rows.owners if owner is not None and not owner.fresh]
            self._rows.renew()
            for session in lost:
                who = f"session {brief(session.name)!r}" if session.name else "the session"
                message = f"{who} is lost, because the stream was left half changed; begin it again"
                self._store.lose(session.key, message)

    def _goes_on(self, session: Session) -> bool:
        """Return whether a session has a request that can run now; a request that does not fit the session ends with an
        error.
        """
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
        """Give rows to sessions that wait for a row, parking other sessions if necessary."""
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
        """Move the sessions that run to the first rows, if the loop computes only the rows up to the last row that
        runs.

        A session whose request needs only one more short segment does not change places with a session that ran within
        the last `LATELY` rounds, because the exchange costs more than the segment.
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
        """Return whether one more segment of the shortest length completes a request."""
        return job.positions_left <= self._cuts.shortest and job.drawn + 1 >= job.work.max_new_tokens

    def _serve(self, parts: list[Part]) -> None:
        """Run one segment, and end the requests that it completes."""
        stopped: BaseException | None = None
        try:
            self._segments.run(parts)
        except Exception as error:  # end the requests of this segment; the server goes on
            if not isinstance(error, TxlError):
                logger.exception("a segment failed")
                error = BackendError(f"the segment failed ({type(error).__name__}: {one_line(error)}); ask again")
            for part in parts:
                part.error = part.error or error
        # raised e.g. by Ctrl-C in a caller's `adjust`, when the token before the draw is already fed
        except BaseException as error:
            stopped = error
            message = "the draw was interrupted, expected a token; ask again with tokens"
            for part in parts:
                if part.interrupted:
                    part.error = part.error or BackendError(message)
        finally:
            counters = self.counters
            counters.rounds += 1
            for part in parts:
                session, fed = part.job.session, part.fed
                session.served, session.turns = counters.rounds, session.turns + 1
                if fed:
                    session.version = next(self._book.numbers)
                    counters.positions += fed
                counters.tokens += len(part.drawn)
                counters.drafted += len(part.draft)
                counters.kept += max(0, fed - 1) if part.draft else 0
        for part in parts:
            self._settle(part)
        if stopped is not None:
            raise stopped

    def _settle(self, part: Part) -> None:
        job, ends = part.job, part.error is None and part.ends()
        if part.broken:
            self._book.drop(job.session, "error", part.error)
        elif part.error is not None:
            self._book.end(job, "error", part.error)
        elif ends:
            self._book.end(job, "stop")
        elif job.done:
            self._book.end(job, "length")

    def _check_start(self, work: Work, session: Session | None, waiting: bool = True) -> None:
        """Check that a request's first input fits the session's pending token.

        Args:
            waiting: whether earlier requests of the session count: if there are any, the check is made again later.

        Raises:
            UsageError: inputs would follow a pending token, or the request has no tokens and the session no pending
                token.
        """
        pending = session is not None and session.pending is not None
        if waiting and session is not None and session.jobs:
            return  # `_goes_on` checks again: earlier requests of the session may still draw a pending token
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
    """Return the first request of each session that has a request and a row."""
    return [session.jobs[0] for session in sessions if session.row is not None and session.jobs]
