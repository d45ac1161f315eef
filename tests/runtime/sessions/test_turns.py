"""Whose turn it is, when requests and sessions end, and what there is room for."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import numpy as np
import pytest
from sessions_alone import alone, assert_same, drawn, run
from sessions_alone import given as gathered
from step_models import VOCABULARY
from txl_runtime import UsageError
from txl_runtime.sessions import Busy, Finished, Limits, Prompt, Request, Sampling, Sessions, turns
from txl_runtime.sessions.jobs import Session
from txl_runtime.sessions.turns import LATELY, SHORT_SLICE, SLICE, closing_up, leaver

# --- whose turn it is ---------------------------------------------------------------------------------------------


def test_a_long_prompt_does_not_keep_others_from_decoding(model_of):
    with Sessions(model_of("counting")) as sessions:
        decoding = sessions.submit(Request([1], 50, Sampling(seed=1)))
        sessions.round()
        prompt = sessions.submit(Request([2] * 400))
        before = sessions.counters.rounds
        assert len(decoding.events()) == 1
        while not prompt.done:
            sessions.round()
            if not decoding.done:
                assert len(drawn(decoding)) == (sessions.counters.rounds - before + 1) % 2
        assert decoding.done
        assert sessions.counters.rounds - before == 2 * 49 + 100 - 49


def test_prompts_that_are_cut_differently_run_their_own_cuts(model_of):
    """Segments of 4 and 1: what is left of a prompt runs in the program that it runs in alone."""
    with Sessions(model_of("counting")) as sessions:
        tickets = [sessions.submit(Request([1] * length, score=True)) for length in (9, 4, 6)]
        run(sessions)
        for ticket, cuts in zip(tickets, ([4, 4], [3], [4, 1]), strict=True):
            told = [len(event.logprobs) for event in ticket.events() if isinstance(event, Prompt)]
            assert told == cuts


def test_more_requests_than_rows_take_turns(model_of):
    with Sessions(model_of("counting"), rows=2) as sessions:
        tickets = [sessions.submit(Request([1], 400, Sampling(seed=number)), f"s{number}") for number in range(7)]
        most = [0] * 7
        while any(not ticket.done for ticket in tickets):
            sessions.round()
            most = [count + len(drawn(ticket)) for count, ticket in zip(most, tickets, strict=True)]
            if not any(ticket.done for ticket in tickets):
                assert max(most) - min(most) <= 3 * SLICE, "nobody is ahead by more than some slices"
        assert most == [400] * 7
        assert sessions.counters.parked >= 7 * 5


def test_whoever_waited_longest_comes_first(model_of):
    with Sessions(model_of("counting"), rows=1) as sessions:
        order: list[int] = []
        for number in range(5):
            sessions.submit(Request([1], 1, until=lambda _, number=number: order.append(number) or False))
        run(sessions)
        assert order == [0, 1, 2, 3, 4]


def test_a_session_s_requests_are_served_one_after_the_other(model_of):
    with Sessions(model_of("counting")) as sessions:
        first, second = (sessions.submit(Request([1, 2], 4, Sampling(seed=seed)), "anna") for seed in (1, 2))
        assert (sessions.info("anna").running, sessions.info("anna").waiting) == (True, 1)
        while not first.done:
            sessions.round()
            assert not second.unread
        run(sessions)
        assert gathered(second.events()).fed == 1 + 2 + 3
        info = sessions.info("anna")
        assert (info.seen, info.place, info.running, info.waiting) == (2 + 3 + 6, "row", False, 0)
        assert info.pending is not None


def test_sessions_are_on_the_lowest_rows(model_of):
    with Sessions(model_of("counting")) as sessions:
        tickets = [sessions.submit(Request([1], 50)) for _ in range(3)]
        sessions.round()
        tickets[0].cancel()
        named = sessions.submit(Request([1], 1), "anna")
        run(sessions)
        assert named.done
        assert sessions.take("anna").seen == 1


def test_a_newcomer_does_not_stand_behind_all_who_were_there_before(model_of):
    with Sessions(model_of("counting"), rows=1) as sessions:
        first = [sessions.submit(Request([1], 1600), f"s{number}") for number in range(6)]
        for _ in range(SLICE * 12):
            sessions.round()
        assert all(ticket.unread for ticket in first)
        late = sessions.submit(Request([1], 10))
        rounds = sessions.counters.rounds
        while not late.done:
            sessions.round()
        assert sessions.counters.rounds - rounds <= 2 * SLICE + 11
        waited = [ticket.unread for ticket in first]
        for number in range(40):
            sessions.submit(Request([1], 9), f"new {number}")
        for _ in range(SLICE * 12):
            sessions.round()
        assert all(ticket.unread > before for ticket, before in zip(first, waited, strict=True)), (
            "nor keeps them waiting"
        )


def owners(text: str) -> list[Session | None]:
    """Rows from left to right: a dot for a free one, else a session of that name; it is served as it is named."""
    return [None if name == "." else Session(name, name, row, served=ord(name)) for row, name in enumerate(text)]


@pytest.mark.parametrize(
    ("rows", "runnable", "moves"),
    [
        ("abc", "abc", []),
        ("...", "", []),
        ("..c", "c", [("c", 0)]),
        ("ab.d.f", "abdf", [("f", 2)]),
        ("abcdef", "ef", [("f", 0), ("e", 1)]),
        ("abcdef", "bf", [("f", 0)]),
        ("abc", "a", []),
    ],
)
def test_sessions_that_run_come_to_the_first_rows(rows, runnable, moves):
    found = owners(rows)
    live = {owner for owner in found if owner is not None and owner.name in runnable}
    assert [(s.name, row) for s, row in closing_up(found, live)] == moves


@pytest.mark.parametrize(
    ("rows", "runnable", "turns", "between", "row"),
    [
        ("a.c.", "ac", {}, "", 1),
        ("abc", "ac", {}, "", 1),
        ("bac", "c", {}, "", 1),
        ("abc", "abc", {}, "abc", None),
        ("cba", "abc", {"a": SLICE, "b": SLICE}, "", 2),
        ("cba", "abc", {"a": SLICE - 1, "b": SLICE}, "", 1),
        ("cba", "abc", {"a": SHORT_SLICE - 1, "b": SHORT_SLICE}, "abc", 1),
        ("cba", "abc", {"a": SLICE - 1, "c": SHORT_SLICE}, "c", 0),
    ],
)
def test_which_row_is_given_to_one_that_waits(rows, runnable, turns, between, row):
    """Sessions with work that stand between two requests give their rows earlier than those within one."""
    found = owners(rows)
    for owner in found:
        if owner is not None:
            owner.turns = turns.get(owner.name, 0)
            owner.jobs.append(SimpleNamespace(at=0 if owner.name in between else 3))
    live = {owner for owner in found if owner is not None and owner.name in runnable}
    assert leaver(found, live) == row


def watched(sessions: Sessions) -> list[np.ndarray]:
    """The positions that count in each segment of sessions, by row."""
    counted: list[np.ndarray] = []
    loop = sessions._segments.stream.loop
    ran = loop.run
    loop.run = lambda inputs, counts, want: (  # type: ignore[method-assign]
        counted.append(counts.copy()) or ran(inputs, counts, want)
    )
    return counted


def test_prompts_stand_on_the_first_rows(model_of):
    """A prompt that comes to a row behind sessions that decode is exchanged with one of them, once."""
    model, prompt = model_of("ring"), [2, 3, 4, 1] * 5
    with Sessions(model) as sessions:
        tickets = [sessions.submit(Request([1], 60, Sampling(0.0)), name) for name in "ab"]
        sessions.round()
        counted = watched(sessions)
        tickets.append(sessions.submit(Request(prompt, 3, Sampling(0.0)), "late"))
        run(sessions)
        long = [counts.tolist() for counts in counted if counts.max() > 1]
        assert long == [[4, 0, 0]] * 5
        for ticket in tickets[:2]:
            assert_same(gathered(ticket.events()), alone(model, [Request([1], 60, Sampling(0.0))])[0])
        assert_same(gathered(tickets[2].events()), alone(model, [Request(prompt, 3, Sampling(0.0))])[0])


def test_prompts_are_read_some_at_a_time_while_others_decode(model_of, monkeypatch):
    """Those that began go on; nobody is left out, and without anyone who decodes all are read together."""
    monkeypatch.setattr(turns, "LONG", 4)
    with Sessions(model_of("ring")) as sessions:
        counted = watched(sessions)
        decoding = sessions.submit(Request([1], 40), "a")
        sessions.round()
        prompts = [sessions.submit(Request([2] * 12), name) for name in "bc"]
        run(sessions)
        assert [counts.tolist() for counts in counted if counts.max() > 1] == [[4, 0, 0]] * 6
        assert decoding.done
        assert all(ticket.done for ticket in prompts)
        counted.clear()
        for name in "abc":
            sessions.submit(Request([2] * 4), name)
        sessions.round()
        assert [sorted(counts.tolist()) for counts in counted] == [[4, 4, 4]]


def test_rows_that_nobody_needs_are_not_computed(model_of):
    model = model_of("ring")
    assert all(program.open_batch for program in model.manifest.programs if program.kind != "head")
    with Sessions(model) as sessions:
        request, counted = Request([1, 2, 3], 2, Sampling(0.0)), watched(sessions)
        for name in "abc":
            sessions.submit(request, name)
        run(sessions)
        for name in "cba":
            counted.clear()
            ticket = sessions.submit(request, name)
            run(sessions)
            assert all(counts[0] and not counts[1:].any() for counts in counted)
            assert counted
            assert_same(gathered(ticket.events()), alone(model, [request, request])[1])


def test_a_session_with_one_segment_to_run_is_not_exchanged_with_one_that_ran_lately(model_of):
    with Sessions(model_of("ring")) as sessions:

        def after(times: int, name: str) -> list[str | None]:
            for _ in range(times):
                sessions.submit(Request([1]), name)
                run(sessions)
            return [owner and owner.name for owner in sessions._rows.owners]

        assert after(1, "a") + after(1, "b") == ["a", None, None, "a", "b", None]
        assert after(LATELY - 1, "c") == ["a", "b", "c"]
        assert after(2, "c") == ["c", "b", "a"], "it runs alone by now"
        sessions.close("c")
        assert after(1, "b") == ["b", None, "a"], "a free row costs one state alone"


def test_sessions_stay_on_their_rows_where_all_rows_are_computed(model_of, monkeypatch):
    """As on a device, whatever the bundle's graphs leave open."""
    model = model_of("ring")
    opened = model.backend.open_loop

    def whole(*given):
        loop = opened(*given)
        loop.leading = False
        return loop

    monkeypatch.setattr(model.backend, "open_loop", whole)
    with Sessions(model) as sessions:
        for name in "abcb":
            ticket = sessions.submit(Request([1], 1), name)
            run(sessions)
            assert ticket.done
        assert [owner.name for owner in sessions._rows.owners if owner is not None] == ["a", "b", "c"]


# --- ends ---------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_cancelling_keeps_what_was_fed(model_of):
    model = model_of("counting")
    with Sessions(model) as sessions:
        ticket = sessions.submit(Request([1, 2, 3, 4, 5, 6, 7, 8, 9]), "anna")
        sessions.round()
        ticket.cancel()
        assert ticket.events() == [Finished("cancelled", 4)]
        ticket.cancel()
        assert ticket.events() == []
        stream = model.stream(1)
        stream.feed([[1, 2, 3, 4]])
        state = sessions.take("anna")
        assert (state.seen, state.pending) == (4, None)
        np.testing.assert_array_equal(state.state.states["seen"], stream.state()["seen"])
        again = sessions.submit(Request([5], 1, Sampling(0.0)), "anna")
        run(sessions)
        assert drawn(again) == [int(stream.feed([[5]])[0, 0].argmax())]


def test_cancelling_while_decoding_leaves_the_last_token_pending(model_of):
    with Sessions(model_of("counting")) as sessions:
        ticket = sessions.submit(Request([1, 2], 100, Sampling(seed=3)), "anna")
        for _ in range(4):
            sessions.round()
        ticket.cancel()
        *tokens, last = ticket.events()
        assert last == Finished("cancelled", 2 + 3)
        assert sessions.info("anna").pending == tokens[-1].id
        rest = sessions.submit(Request(), "anna")
        run(sessions)
        assert rest.events() == [Finished("length", 1)]
        assert sessions.info("anna").pending is None


def test_a_request_ends_when_its_time_is_over(model_of):
    clock = Clock()
    with Sessions(model_of("counting"), clock=clock) as sessions:
        short = sessions.submit(Request([1], 1000, seconds=5))
        long = sessions.submit(Request([1], 20, seconds=50))
        sessions.round()
        assert sessions.due() == 5
        clock.now += 5
        run(sessions)
        assert short.events()[-1] == Finished("timeout", 1)
        assert long.events()[-1].reason == "length"
        assert sessions.counters.finished["timeout"] == 1


def test_what_ended_before_its_time_is_let_go_with_its_inputs(model_of):
    with Sessions(model_of("counting")) as sessions:
        for _ in range(400):
            sessions.submit(Request([1], seconds=1e6)).cancel()
        assert len(sessions._book._deadlines) <= 66
        waiting = sessions.submit(Request([1], 10**5, seconds=600))
        for _ in range(20):
            ticket = sessions.submit(Request([1] * 9, seconds=600))
            while not ticket.done:
                sessions.round()
        del ticket
        gc.collect()
        assert not waiting.done
        assert sum(held() is not None for _, _, held in sessions._book._deadlines) == 1


def test_a_function_of_the_caller_ends_a_request_as_a_stop_token_does(model_of):
    with Sessions(model_of("counting")) as sessions:
        seen: list[int] = []
        ticket = sessions.submit(Request([1], 50, Sampling(seed=1), until=lambda t: seen.append(t) or len(seen) == 3))
        failing = sessions.submit(Request([1], 50, until=lambda t: 1 / 0), "other")
        run(sessions)
        assert gathered(ticket.events()).drawn == seen
        assert len(seen) == 3
        assert failing.events()[-1].reason == "error"
        assert "until failed on token" in str(failing.error)
        assert "ZeroDivisionError" in str(failing.error)
        assert "other" in sessions


def test_closing_a_session_ends_its_requests_and_leaves_nothing(model_of):
    with Sessions(model_of("counting")) as sessions:
        tickets = [sessions.submit(Request([1], 30, Sampling(seed=1)), "anna") for _ in range(2)]
        sessions.round()
        sessions.close("anna")
        assert [ticket.events()[-1].reason for ticket in tickets] == ["closed", "closed"]
        assert "anna" not in sessions
        with pytest.raises(UsageError, match="no session is named 'anna', expected one of 0"):
            sessions.close("anna")
        fresh = sessions.submit(Request([1], 3, Sampling(seed=1)), "anna")
        run(sessions)
        assert fresh.events()[-1] == Finished("length", 3)


def test_cancelling_a_session_ends_its_requests_and_leaves_it(model_of):
    with Sessions(model_of("counting")) as sessions:
        *tickets, waiting = (sessions.submit(Request([1], 30, Sampling(seed=1)), "anna") for _ in range(3))
        waiting.cancel()
        assert waiting.events() == [Finished("cancelled", 0)]
        sessions.round()
        assert sessions.cancel("anna") == 2
        assert [ticket.events()[-1] for ticket in tickets] == [Finished("cancelled", 1), Finished("cancelled", 0)]
        assert (sessions.info("anna").seen, sessions.info("anna").running) == (1, False)
        assert sessions.cancel("anna") == 0
        with pytest.raises(UsageError, match="no session is named 'bea'"):
            sessions.cancel("bea")


def test_sessions_that_nobody_uses_are_closed(model_of):
    clock = Clock()
    with Sessions(model_of("counting"), limits=Limits(idle_seconds=10), clock=clock) as sessions:
        for name in ("old", "new"):
            sessions.submit(Request([1]), name)
            run(sessions)
            clock.now += 6
        assert sessions.names() == ["old", "new"]
        assert (sessions.info("old").idle_seconds, sessions.due()) == (12, 0)
        busy = sessions.submit(Request([1], 9), "busy", unread=1)
        clock.now += 3
        sessions.round()
        assert sessions.names() == ["new", "busy"]
        clock.now += 100
        assert sessions.expire() == 1
        assert sessions.names() == ["busy"], "who has a request is not idle"
        assert busy.events()
        assert sessions.counters.expired == 2


def test_shutting_ends_everything(model_of):
    sessions = Sessions(model_of("counting"), rows=1)
    with sessions:
        tickets = [sessions.submit(Request([1], 400), f"s{number}") for number in range(3)]
        for _ in range(3 * SLICE + 1):
            sessions.round()
        assert {sessions.info(f"s{number}").place for number in range(3)} == {"row", "host"}
    assert [ticket.events()[-1].reason for ticket in tickets] == ["closed"] * 3
    assert (sessions.names(), sessions.host_bytes) == ([], 0)


def test_ending_requests_leaves_sessions(model_of):
    with Sessions(model_of("counting")) as sessions:
        ticket = sessions.submit(Request([1], 30), "anna")
        sessions.round()
        sessions.end_requests()
        assert ticket.events()[-1] == Finished("closed", 1)
        assert sessions.take("anna").seen == 1


# --- room ---------------------------------------------------------------------------------------------------------


def test_too_many_requests_are_refused_and_nothing_is_taken_in(model_of):
    with Sessions(model_of("counting"), rows=2, limits=Limits(waiting=3)) as sessions:
        tickets = [sessions.submit(Request([1], 5), f"s{number}") for number in range(5)]
        with pytest.raises(Busy, match=r"5 requests .* fewer than 2 rows and Limits\.waiting 3; come") as caught:
            sessions.submit(Request([1]), "late")
        assert 1 <= caught.value.retry_after <= 60
        assert "late" not in sessions
        run(sessions)
        assert all(ticket.done for ticket in tickets)
        assert sessions.submit(Request([1]), "late")
        assert sessions.counters.busy == 1


def test_too_many_sessions_are_refused_until_one_goes(model_of):
    clock = Clock()
    with Sessions(model_of("counting"), limits=Limits(sessions=2, idle_seconds=100), clock=clock) as sessions:
        for name in ("a", "b"):
            sessions.submit(Request([1]), name)
        run(sessions)
        clock.now += 30
        with pytest.raises(Busy, match="there are 2 sessions, expected fewer; close one") as caught:
            sessions.submit(Request([1]), "c")
        assert caught.value.retry_after == 70
        with pytest.raises(Busy):
            sessions.put("c", sessions.take("a"))
        assert sessions.submit(Request([1])), "sessions without a name are bounded by their requests"
        assert sessions.submit(Request([1]), "a")
        sessions.close("b")
        assert sessions.submit(Request([1]), "c")


def test_no_more_sessions_are_let_in_than_there_is_room_to_park(model_of):
    model, size = model_of("counting"), VOCABULARY * 4
    with Sessions(model, rows=2, limits=Limits(host_bytes=3 * size)) as sessions:
        tickets = [sessions.submit(Request([1], 40, Sampling(seed=1)), f"s{number}") for number in range(5)]
        with pytest.raises(Busy, match="there are 5 sessions"):
            sessions.submit(Request([1]), "s5")
        strangers = [sessions.submit(Request([1], 40, Sampling(seed=1))) for _ in range(4)]
        while sessions.round():
            assert sessions.host_bytes <= (3 + 2) * size
        assert len({tuple(drawn(ticket)) for ticket in (*tickets, *strangers)}) == 1


def test_inputs_of_unfinished_requests_are_bounded(model_of):
    with Sessions(model_of("counting"), limits=Limits(input_bytes=100)) as sessions:
        with pytest.raises(UsageError, match="the request's inputs have 104 bytes, expected at most 100"):
            sessions.submit(Request([1] * 26))
        sessions.submit(Request([1] * 20))
        with pytest.raises(Busy, match="the inputs of unfinished requests have 80 bytes"):
            sessions.submit(Request([1] * 6))
        run(sessions)
        sessions.submit(Request([1] * 6))


@pytest.mark.parametrize("limits", [Limits(sessions=2), Limits(host_bytes=0)], ids=["as many as may be", "no room"])
def test_readers_that_are_slow_never_keep_all_rows(model_of, limits):
    """There is no room for one session more: a stranger whose reader is slow leaves its row all the same."""
    with Sessions(model_of("counting"), 1, limits) as sessions:
        names = [f"s{number}" for number in range(min(sessions._store.capacity(1), 2))]
        for name in names:
            sessions.submit(Request([1], 1), name)
            run(sessions)
        slow = [sessions.submit(Request([1], 10, Sampling(seed=1)), unread=4) for _ in range(3)]
        run(sessions)
        assert [(ticket.unread, ticket.done) for ticket in slow] == [(4, False)] * 3
        others = [sessions.submit(Request([1], 10, Sampling(seed=1)), name) for name in (*names, None)]
        run(sessions)
        assert all(ticket.done for ticket in others)
        for ticket in slow:
            found = drawn(ticket)
            while not ticket.done:
                run(sessions)
                found += drawn(ticket)
            assert found == drawn(others[-1]) or ticket is not slow[0]
        assert sessions.counters.finished["length"] == len(names) * 2 + 4
        assert not sessions.host_bytes or names


def test_strangers_take_turns_with_as_many_sessions_as_there_may_be(model_of):
    """Strangers may use the bytes that the number of sessions leaves."""
    with Sessions(model_of("counting"), 1, Limits(sessions=1)) as sessions:
        sessions.submit(Request([1]), "anna")
        run(sessions)
        sessions.submit(Request([1], 10**5))
        for _ in range(3):
            sessions.round()
        anna = sessions.submit(Request([1], 3), "anna")
        for _ in range(SLICE + 4):
            sessions.round()
        assert anna.done


def test_strangers_begin_where_there_is_room_and_a_round_says_whether_anything_ran(model_of):
    with Sessions(model_of("counting"), 1, Limits(host_bytes=0)) as sessions:
        tickets = [sessions.submit(Request([1], 40, Sampling(seed=1))) for _ in range(5)]
        room, sessions._book.room = sessions._book.room, lambda: 0
        assert not sessions.round(), "nothing ran"
        sessions._book.room = room
        told = 0
        while not all(ticket.done for ticket in tickets):
            told += sessions.round()
            assert sum(ticket.unread > 0 and not ticket.done for ticket in tickets) <= 2
            assert sessions.host_bytes <= VOCABULARY * 4
        assert told == sessions.counters.rounds
        assert not sessions.round()


def test_idle_sessions_stay_on_the_rows_that_nobody_needs(model_of):
    model = model_of("ring")
    request = Request([1, 2, 3], 2, Sampling(0.0))
    with Sessions(model) as sessions:
        assert sessions.rows == 3
        for _ in range(2):
            for name in "abc":
                sessions.submit(request, name)
                run(sessions)
        assert [sessions.info(name).place for name in "abc"] == ["row"] * 3
        assert (sessions.counters.parked, sessions.counters.resumed) == (0, 0)
        for number in range(3):
            ticket = sessions.submit(request, f"more {number}")
            run(sessions)
        assert sum(sessions.info(name).place == "row" for name in sessions.names()) == 3
        assert sessions.counters.parked == 3
        ticket = sessions.submit(request, "b")
        run(sessions)
        assert_same(gathered(ticket.events()), alone(model, [request] * 3)[2])
