"""The class `AsyncSessions`, for asyncio: one thread runs the sessions, and readers wait for events in an event loop.

`save_beside` makes a checkpoint while sessions run: the core copies states between rounds, and a second thread writes
the copies to disk.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from txl_runtime.errors import TxlError, UsageError, one_line
from txl_runtime.sessions.checkpoint import Checkpoint
from txl_runtime.sessions.core import Sessions
from txl_runtime.sessions.jobs import Ticket
from txl_runtime.sessions.requests import ClosedError, Event, Finished, Request

logger = logging.getLogger(__name__)
T = TypeVar("T")

UNREAD = 64
"""Number of unread events at which a request pauses until its reader catches up."""
SOONEST, LATEST = 0.001, 3600.0
"""Shortest and longest time to wait for a deadline, in seconds: 0 would spin, and a lock refuses very long waits."""


class Handle:
    """A reader's handle of an accepted request; a handle belongs to one event loop.

    Attributes:
        session: the name of the request's session; "" for an unnamed session, which ends with the request.
        ticket: the core's ticket; any thread may read its `done` and `error`.
    """

    def __init__(self, front: AsyncSessions, ticket: Ticket) -> None:
        self.session, self.ticket = ticket.session, ticket
        self._front, self._came, self.told = front, asyncio.Event(), False

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Yield lists of new events as they come; the last event is `Finished`.

        Leaving the iteration early cancels the request.
        """
        try:
            while True:
                await self._came.wait()
                self._came.clear()
                self.told = False
                events = self.ticket.events()
                # count the events that were read: the thread may have added more since
                if self.ticket.paused_at(len(events)):
                    self._front.nudge()
                if events:
                    yield events
                    if isinstance(events[-1], Finished):
                        return
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the request before the next round, with reason "cancelled"; do nothing if the request has ended."""
        if not self.ticket.done:
            self._front.post(lambda _: self.ticket.cancel())

    def wake(self) -> None:
        """Wake the reader because there are new events; the reader's event loop calls this."""
        self._came.set()


class AsyncSessions:
    """Sessions for the tasks of one event loop.

    A separate thread calls the core, so no method here blocks the event loop. The thread sleeps while no request can
    run. A request whose reader falls behind pauses, and its row is given to other sessions.

    Leaving the context ends all unfinished requests with reason "closed". The caller may then use the core directly.

    Args:
        sessions: the core; nobody else may call it while the context is open.
        unread: number of unread events at which a request pauses.
    """

    def __init__(self, sessions: Sessions, unread: int = UNREAD) -> None:
        self._sessions, self._unread = sessions, unread
        self._lock = threading.Condition()
        self._calls: deque[tuple[Future[Any], Callable[[Sessions], Any]]] = deque()
        self._nudged = self._closing = self._closed = False
        self._handles: list[Handle] = []
        self._drains: list[Future[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def __aenter__(self) -> AsyncSessions:
        if self._thread is not None:
            raise UsageError("these sessions were entered already, expected once; make another AsyncSessions")
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="txl-sessions", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        with self._lock:
            self._closing = True
            self._lock.notify()
        assert self._thread is not None
        await asyncio.shield(asyncio.to_thread(self._thread.join))

    async def submit(
        self, request: Request, session: str | None = None, before: Callable[[Sessions], object] | None = None
    ) -> Handle:
        """Accept a request; see `Sessions.submit`.

        Args:
            request: the request.
            session: name of the session; None for an unnamed session.
            before: a function that the core's thread calls with the sessions right before it submits the request; if
                the function raises, the request is refused with that error.

        Raises:
            UsageError: the request does not fit the model or the limits.
            ClosedError: the thread has ended, or the context was not entered.
            Busy: a limit is reached; try again later.
        """
        future = self.post(lambda sessions: self._take_in(sessions, request, session, before))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_give_up)  # the thread may accept the request after this task was cancelled
            raise

    async def run(self, request: Request, session: str | None = None) -> AsyncIterator[Event]:
        """Submit a request and yield its events. Leaving the iteration early cancels the request.

        Raises:
            UsageError: as in `submit`.
            ClosedError: as in `submit`.
            Busy: as in `submit`.
        """
        handle = await self.submit(request, session)
        try:
            async for events in handle.batches():
                for event in events:
                    yield event
        finally:
            handle.cancel()

    async def call(self, function: Callable[[Sessions], T]) -> T:
        """Let the core's thread call `function(sessions)` between two rounds, and return the result.

        Raises:
            ClosedError: the thread has ended, or the context was not entered.
        """
        return await asyncio.wrap_future(self.post(function))

    async def ended(self) -> None:
        """Wait until the thread has ended, either because the context was left or because the thread failed. The thread
        never starts again.
        """
        assert self._thread is not None
        await asyncio.to_thread(self._thread.join)

    async def drain(self) -> None:
        """Wait until every request has ended."""
        future: Future[None] = Future()
        await self.call(lambda _: self._drains.append(future))
        await asyncio.wrap_future(future)

    # --- for handles and the thread ---------------------------------------------------------------------------------

    def post(self, function: Callable[[Sessions], T]) -> Future[T]:
        """Let the thread call a function between two rounds; if no thread runs, the future raises `ClosedError`."""
        future: Future[T] = Future()
        with self._lock:
            if self._thread is None or self._closed:
                future.set_exception(ClosedError("the sessions are closed, expected them entered: async with ..."))
                return future
            self._calls.append((future, function))
            self._lock.notify()
        return future

    def nudge(self) -> None:
        """Wake the thread, because a reader has caught up and its paused request may go on."""
        with self._lock:
            self._nudged = True
            self._lock.notify()

    def _work(self) -> None:
        """Run rounds and posted functions until the context is left. This is the thread's main function."""
        try:
            resting = False
            while True:
                with self._lock:
                    if resting and not self._calls and not self._nudged and not self._closing:
                        due = self._sessions.due()
                        self._lock.wait(None if due is None else min(max(due, SOONEST), LATEST))
                    calls, self._calls, self._nudged, closing = self._calls, deque(), False, self._closing
                for future, function in calls:
                    _answer(future, function, self._sessions)
                if closing:
                    return
                resting = not self._sessions.round()
                self._tell()
        except BaseException as error:
            logger.exception("the thread of the sessions failed")
            self._fail(error)
        finally:
            self._finish()

    def _take_in(
        self,
        sessions: Sessions,
        request: Request,
        session: str | None,
        before: Callable[[Sessions], object] | None,
    ) -> Handle:
        if before is not None:
            before(sessions)
        handle = Handle(self, sessions.submit(request, session, self._unread))
        self._handles.append(handle)
        return handle

    def _tell(self, over: bool = False) -> None:
        """Wake the readers whose requests have events, in one call into their event loop.

        Args:
            over: True when the thread ends: waiting `drain` calls then return even if requests are unfinished.
        """
        waiting = [handle for handle in self._handles if not handle.told and handle.ticket.unread]
        for handle in waiting:
            handle.told = True
        if waiting:
            self._later(lambda: _wake(waiting))
        self._handles = [handle for handle in self._handles if not handle.ticket.done]
        if self._drains and (over or not self._sessions.unfinished):
            for future in self._drains:
                if future.set_running_or_notify_cancel():
                    future.set_result(None)
            self._drains.clear()

    def _later(self, function: Callable[[], object]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the event loop was closed while the context was still open
            with self._lock:
                self._closing = True

    def _fail(self, error: BaseException) -> None:
        """End all requests with an error that names the exception that ended the thread."""
        error_for_all = TxlError(
            f"the thread of the sessions failed ({type(error).__name__}: {one_line(error)}); restart it"
        )
        for handle in self._handles:
            if not handle.ticket.done:
                handle.ticket.end("error", 0, error_for_all)

    def _finish(self) -> None:
        """End all unfinished requests, and answer posted functions that were never called with `ClosedError`."""
        try:
            self._sessions.end_requests()
        finally:
            with self._lock:
                self._closed, calls = True, self._calls
            for future, _ in calls:
                if future.set_running_or_notify_cancel():
                    future.set_exception(ClosedError("the sessions were closed, expected them open; begin again"))
            self._tell(over=True)


async def save_beside(front: AsyncSessions, checkpoint: Checkpoint) -> int:
    """Save all sessions while they run; a round is delayed at most by the copy of one state.

    If the task is cancelled, the save stops at the next session and the folder keeps its previous checkpoint. The task
    ends only when the save has stopped, so a new save can begin at once.

    Returns:
        The number of states that were written.

    Raises:
        TxlError: the disk is full or fails; the folder keeps its previous checkpoint.
    """
    cancelled = False

    def save() -> int:
        with checkpoint.begin(front.post(Sessions.versions).result()) as saving:
            for name in saving.wanted:
                if cancelled:
                    return 0
                try:
                    state = front.post(partial(Sessions.take, name=name)).result()
                except TxlError:  # the session was closed after the list was made, or its state is lost
                    continue
                saving.add(name, state)
            return saving.finish()

    work = asyncio.ensure_future(asyncio.to_thread(save))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        cancelled = True
        await asyncio.wait([work])
        raise


def _wake(handles: Sequence[Handle]) -> None:
    for handle in handles:
        handle.wake()


def _answer(future: Future[Any], function: Callable[[Sessions], Any], sessions: Sessions) -> None:
    """Call a function with the sessions, and put its result or exception into the future."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(sessions))
    except BaseException as error:
        future.set_exception(error)


def _give_up(future: Future[Handle]) -> None:
    """Cancel a request that the thread accepted after the task that submitted it was cancelled."""
    if not future.cancelled() and future.exception() is None:
        future.result().cancel()
