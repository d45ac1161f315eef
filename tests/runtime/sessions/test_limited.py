"""Requests that limit the memory rows of their session: while they run, and not for those beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from random_sessions import bits
from sessions_alone import alone, assert_same, drawn, given, run
from txl_runtime import UsageError
from txl_runtime.sessions import Prompt, Request, Sampling, Sessions, SessionState, Token
from txl_runtime.sessions.turns import SLICE

M = 6
RULES = pytest.mark.parametrize("kind", ["ring", "rolled"])


def asked(seed: int, rows: int | None, count: int = 6) -> Request:
    tokens = np.random.default_rng(seed).integers(0, 41, 9)
    return Request(tokens, count, Sampling(seed=seed), top_logprobs=2, score=True, memory_length=rows)


@RULES
def test_a_session_sees_what_its_requests_allow(model_of, kind):
    requests = [asked(seed, rows) for seed, rows in enumerate([None, 2, None, 0, 5, M, 3])]
    with Sessions(model_of(kind)) as sessions:
        tickets = [sessions.submit(request, "anna") for request in requests]
        run(sessions)
        expected = alone(model_of(kind), requests)
        for ticket, wanted in zip(tickets, expected, strict=True):
            assert_same(given(ticket.events()), wanted)
        free = alone(model_of(kind), [asked(seed, None) for seed in range(7)])
        assert [each.scored.tolist() for each in free[1:]] != [each.scored.tolist() for each in expected[1:]]


@RULES
def test_neighbours_have_the_bits_that_they_have_beside_requests_without_a_limit(model_of, kind):
    told = []
    for rows in (None, 1):
        with Sessions(model_of(kind), rows=3) as sessions:
            tickets = [sessions.submit(asked(seed, rows if seed == 1 else None, 20), f"s{seed}") for seed in range(3)]
            run(sessions)
            events = [ticket.events()[:-1] for ticket in tickets]
            states = [bits(sessions.take(f"s{seed}")) for seed in range(3)]
        said = [
            [event.logprobs.tobytes() if isinstance(event, Prompt) else event for event in found] for found in events
        ]
        assert all(isinstance(event, bytes | Token) for found in said for event in found)
        told.append(list(zip(said, states, strict=True)))
    free, limited = told
    assert [free[seed] == limited[seed] for seed in range(3)] == [True, False, True]


@RULES
def test_whoever_comes_to_the_row_next_has_all_of_the_memory(model_of, kind):
    """On one row, sessions take turns while one of them is limited."""
    requests = {f"s{seed}": asked(seed, 2 if seed % 2 else None, SLICE + 20) for seed in range(4)}
    with Sessions(model_of(kind), rows=1) as sessions:
        tickets = {name: sessions.submit(request, name) for name, request in requests.items()}
        run(sessions)
        assert sessions.counters.parked >= 4
        for name, ticket in tickets.items():
            assert_same(given(ticket.events()), alone(model_of(kind), [requests[name]])[0])
        assert [sessions.info(name).fill for name in requests] == [M, 2, M, 2]


def test_what_was_cut_off_is_gone_and_the_memory_grows_again(model_of):
    with Sessions(model_of("ring")) as sessions:
        fills = list[int | None]()
        for tokens, rows in ((9, None), (1, 3), (1, None), (0, 0), (2, None)):
            ticket = sessions.submit(Request([5] * tokens, 1, memory_length=rows), "anna")
            run(sessions)
            assert len(drawn(ticket)) == 1
            fills.append(sessions.info("anna").fill)
        assert fills == [M, 3, 5, 0, 3]  # a token that was drawn before is fed with each


def test_how_many_rows_there_are_is_told_wherever_the_state_is(model_of):
    with Sessions(model_of("ring"), rows=1) as sessions:
        ticket = sessions.submit(Request([1, 2, 3]), "anna")
        assert (sessions.info("anna").place, sessions.info("anna").fill) == ("new", 0)
        run(sessions)
        assert ticket.done
        assert (sessions.info("anna").place, sessions.info("anna").fill) == ("row", 3)
        sessions.submit(Request([1] * 20), "bea")
        run(sessions)
        assert (sessions.info("anna").place, sessions.info("anna").fill) == ("host", 3)
        assert sessions.info("bea").fill == M
        sessions.put("carl", SessionState.from_bytes(sessions.take("anna").to_bytes()))
        assert sessions.info("carl").fill == 3
        sessions.submit(Request([4]), "anna")
        run(sessions)
        assert (sessions.info("anna").place, sessions.info("anna").fill) == ("row", 4)
    with Sessions(model_of("counting")) as sessions:
        sessions.submit(Request([1]), "anna")
        run(sessions)
        assert sessions.info("anna").fill is None


def test_a_limit_that_is_none_is_refused(model_of):
    def refused(kind: str, rows: Any, said: str, **inputs: Any) -> None:
        with Sessions(model_of(kind)) as sessions:
            with pytest.raises(UsageError, match=said):
                sessions.submit(Request(**(inputs or {"tokens": [1]}), memory_length=rows), "anna")
            assert sessions.names() == []

    for wrong in (-1, M + 1, True, 1.0, "2"):
        refused("ring", wrong, f"memory_length is .*, expected 0 … {M}")
    refused("counting", 1, "this model counts no memory rows")
    refused("recurrent", 1, "this model counts no memory rows", inputs={"x": np.zeros((1, 1, 1))})


@RULES
def test_a_segment_that_fails_cuts_nothing_off_and_leaves_no_limit_behind(model_of, kind, monkeypatch):
    requests = [Request([1, 2, 3] * 3), Request([4], 6, Sampling(seed=1), top_logprobs=2)]
    with Sessions(model_of(kind), rows=1) as sessions:
        sessions.submit(requests[0], "anna")
        run(sessions)
        loop = sessions._segments.stream.loop
        with monkeypatch.context() as failing:
            failing.setattr(type(loop), "run", lambda *_, **__: 1 / 0)
            ticket = sessions.submit(Request([1], memory_length=1), "anna")
            run(sessions)
        assert "the segment failed" in str(ticket.error)
        assert (sessions.info("anna").fill, sessions.info("anna").seen) == (M, 9)
        ticket = sessions.submit(requests[1], "anna")
        run(sessions)
        assert_same(given(ticket.events()), alone(model_of(kind), requests)[1])
        assert sessions.info("anna").fill == M
