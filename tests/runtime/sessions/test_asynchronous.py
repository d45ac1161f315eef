"""Sessions for asyncio: readers of every kind, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from sessions_alone import alone, assert_same
from sessions_alone import given as gathered
from txl_runtime import TxlError, UsageError
from txl_runtime.sessions import (
    AsyncSessions,
    Busy,
    Event,
    Finished,
    Limits,
    Request,
    Sampling,
    Sessions,
    Ticket,
    Token,
)


@pytest.fixture
def fronted(model_of):
    """Run a coroutine function with a front over sessions of the counting model."""

    def run(work: Callable[[AsyncSessions], Awaitable[Any]], unread: int = 64, **options: Any) -> Any:
        async def inside() -> Any:
            with Sessions(model_of("counting"), **options) as sessions:
                async with AsyncSessions(sessions, unread) as front:
                    found = await asyncio.wait_for(work(front), 60)
                assert sessions.unfinished == 0
                return found

        before = set(threading.enumerate())  # a server of other tests may run
        found = asyncio.run(inside())
        assert not any(thread.name == "txl-sessions" for thread in set(threading.enumerate()) - before)
        return found

    return run


async def read(front: AsyncSessions, request: Request, session: str | None = None) -> list[Event]:
    return [event async for event in front.run(request, session)]


def some(seed: int) -> Request:
    tokens = np.random.default_rng(seed).integers(0, 11, 1 + seed % 9)
    return Request(tokens, 10, Sampling([0.0, 0.8, 1.0][seed % 3], seed=seed), top_logprobs=seed % 4, score=True)


def test_readers_beside_each_other_are_given_what_each_alone_is_given(fronted, model_of):
    found = fronted(lambda front: asyncio.gather(*(read(front, some(seed)) for seed in range(12))))
    for seed, events in enumerate(found):
        assert_same(gathered(events), *alone(model_of("counting"), [some(seed)]))


def test_a_session_goes_on_from_request_to_request(fronted, model_of):
    async def work(front: AsyncSessions) -> list[list[Event]]:
        return [await read(front, some(seed), "anna") for seed in range(3)]

    for events, expected in zip(fronted(work), alone(model_of("counting"), [some(s) for s in range(3)]), strict=True):
        assert_same(gathered(events), expected)


def test_what_is_refused_is_refused_before_anything_is_read(fronted):
    async def work(front: AsyncSessions) -> None:
        with pytest.raises(UsageError, match="hold id 99"):
            await front.submit(Request([99]))
        with pytest.raises(UsageError, match="hold id 99"):
            await read(front, Request([99]))
        handles = [await front.submit(Request([1], 10**5)) for _ in range(4)]
        with pytest.raises(Busy) as caught:
            await front.submit(Request([1]))
        assert caught.value.retry_after >= 1
        for handle in handles:
            handle.cancel()
        await front.drain()

    fronted(work, rows=2, limits=Limits(waiting=2))


def test_a_reader_that_leaves_cancels(fronted):
    async def work(front: AsyncSessions) -> None:
        count = 0
        async for event in front.run(Request([1], 10**5), "anna"):
            count += isinstance(event, Token)
            if count == 5:
                break
        await front.drain()
        assert (await front.call(lambda sessions: sessions.counters)).finished["cancelled"] == 1
        seen = (await front.call(lambda sessions: sessions.info("anna"))).seen
        assert 5 <= seen <= 5 + 2 * 64, "the session is where it was cancelled"
        task = asyncio.ensure_future(read(front, Request([1], 10**5)))
        while not await front.call(lambda sessions: sessions.unfinished):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await front.drain()
        assert (await front.call(lambda sessions: sessions.counters)).finished["cancelled"] == 2

    fronted(work)


def test_whoever_leaves_while_a_request_is_taken_in_leaves_no_request_behind(fronted):
    async def work(front: AsyncSessions) -> None:
        for _ in range(30):
            task = asyncio.ensure_future(front.submit(Request([1], 10**5)))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await front.drain()

    fronted(work)


def test_a_slow_reader_s_request_pauses_and_others_go_on(fronted):
    async def work(front: AsyncSessions) -> None:
        slow = await front.submit(Request([1], 100, Sampling(seed=1)))
        quick = [await read(front, Request([1], 100, Sampling(seed=1))) for _ in range(3)]
        assert slow.ticket.unread == 8
        found: list[Event] = []
        async for events in slow.batches():
            assert len(events) <= 8 + 1
            found += events
            await asyncio.sleep(0.001)
        assert all(found == other for other in quick)

    fronted(work, unread=8, rows=1)


def test_a_request_that_pauses_while_it_is_read_goes_on(fronted, monkeypatch):
    """The thread fills the ticket up and rests, right before the reader empties it."""
    read_all, switched = Ticket.events, list[int]()

    def late(ticket: Ticket) -> list[Event]:
        started = time.monotonic()
        while not (ticket.waits or ticket.done) and time.monotonic() - started < 10:
            time.sleep(0.001)
        time.sleep(0.05)  # until the thread has seen it
        switched.append(ticket.unread)
        return read_all(ticket)

    async def work(front: AsyncSessions) -> None:
        monkeypatch.setattr(Ticket, "events", late)
        events = await asyncio.wait_for(read(front, Request([1, 2, 3], 10)), 20)
        assert len(events) == 11
        assert switched[:2] == [4, 4]

    fronted(work, unread=4)


@pytest.mark.parametrize(("idle", "seconds"), [(1e10, None), (1e300, 1e12)])
def test_times_that_are_longer_than_a_thread_can_wait_are_never(fronted, idle, seconds):
    async def work(front: AsyncSessions) -> None:
        for _ in range(2):
            handle = await front.submit(Request([1], 200, seconds=seconds), "anna")
            while handle.ticket.unread < 64:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)  # the thread rests, with a time to wait for
            assert (await _last(handle)).reason == "length"

    fronted(work, limits=Limits(idle_seconds=idle))


def test_batches_come_with_one_wake_up_for_all_events_of_some_rounds(fronted):
    async def work(front: AsyncSessions) -> int:
        handle = await front.submit(Request([1], 60, Sampling(seed=1)))
        while not handle.ticket.done:
            await asyncio.sleep(0.01)
        return len([events async for events in handle.batches()])

    assert fronted(work) == 1


def test_leaving_ends_what_runs_and_the_sessions_stay(model_of):
    async def work() -> None:
        with Sessions(model_of("counting")) as sessions:
            async with AsyncSessions(sessions) as front:
                handle = await front.submit(Request([1], 10**5), "anna")
                reader = asyncio.ensure_future(_last(handle))
                while not handle.ticket.unread:
                    await asyncio.sleep(0)
            assert (await reader).reason == "closed"
            assert sessions.names() == ["anna"]
            for late in (front.submit(Request([1])), front.call(lambda sessions: sessions)):
                with pytest.raises(UsageError, match="the sessions are closed, expected them entered"):
                    await late
            with pytest.raises(UsageError, match="were entered already, expected once"):
                await front.__aenter__()
            ticket = sessions.submit(Request([1], 2), "anna")
            while sessions.round():
                pass
            assert ticket.done

    asyncio.run(work())


async def _last(handle: Any) -> Finished:
    last = None
    async for events in handle.batches():
        last = events[-1]
    assert isinstance(last, Finished)
    return last


def test_calls_run_between_rounds_and_raise_what_they_raise(fronted):
    async def work(front: AsyncSessions) -> None:
        names = {await front.call(lambda _: threading.current_thread().name) for _ in range(2)}
        assert names == {"txl-sessions"}
        with pytest.raises(ZeroDivisionError):
            await front.call(lambda _: 1 / 0)
        assert len(await read(front, Request([1], 2))) == 3

    fronted(work)


def test_a_thread_that_has_nothing_to_do_uses_no_time(fronted):
    async def work(front: AsyncSessions) -> None:
        await read(front, Request([1], 3), "anna")
        slow = await front.submit(Request([1], 10**5))
        while slow.ticket.unread < 64:
            await asyncio.sleep(0.01)
        rounds = (await front.call(lambda sessions: sessions.counters)).rounds
        turns: list[int] = []
        due = front._sessions.due

        def counted() -> float | None:
            turns.append(1)
            return due()

        front._sessions.due = counted
        await asyncio.sleep(0.3)
        assert len(turns) <= 2, "it waits to be called"
        assert (await front.call(lambda sessions: sessions.counters)).rounds == rounds
        slow.cancel()

    fronted(work)


def test_a_request_that_pauses_still_runs_out_of_time(fronted):
    async def work(front: AsyncSessions) -> None:
        handle = await front.submit(Request([1], 10**5, seconds=0.2))
        await asyncio.wait_for(front.drain(), 30)
        assert (await _last(handle)).reason == "timeout"

    fronted(work)


def test_a_thread_that_fails_while_somebody_waits_for_the_end_of_all_requests_tells_him(model_of, caplog):
    async def work() -> None:
        sessions = Sessions(model_of("counting"))
        async with AsyncSessions(sessions, unread=1) as front:
            handle = await front.submit(Request([1], 1000))  # it pauses, since nobody reads
            drained = asyncio.create_task(front.drain())
            while not front._drains:
                await asyncio.sleep(0.001)
            sessions.round = _fail
            front.nudge()
            await asyncio.wait_for(drained, 60)
            assert handle.ticket.done

    asyncio.run(work())
    assert "the thread of the sessions failed" in caplog.text


def test_a_thread_that_fails_tells_everybody(model_of, caplog):
    async def work() -> None:
        sessions = Sessions(model_of("counting"))
        async with AsyncSessions(sessions) as front:
            handle = await front.submit(Request([1], 10**5))
            sessions.round = _fail
            assert (await _last(handle)).reason == "error"
            error = handle.ticket.error
            assert isinstance(error, TxlError)
            assert "the thread of the sessions failed (RuntimeError: of a fault); restart it" in str(error)

            async def until_refused() -> None:
                while True:
                    await front.submit(Request([1]))

            with pytest.raises(UsageError, match="the sessions are closed"):
                await asyncio.wait_for(until_refused(), 30)

    asyncio.run(work())
    assert "the thread of the sessions failed" in caplog.text


def _fail() -> bool:
    raise RuntimeError("of a fault")
