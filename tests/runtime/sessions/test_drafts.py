"""Requests with `lookup`: the tokens, events and counts of requests without, in fewer rounds.

Each session keeps its own part of a segment, and drafts are made where all of a round have one. A neighbour that has
none, reads its prompt or fails changes no token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from drafting import Eager, windowed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sessions_alone import alone, assert_same, drawn, run
from sessions_alone import given as gathered
from stand_ins.steps import speaking
from step_models import counting
from txl_runtime import BackendError, Model, UsageError, load
from txl_runtime.sessions import Finished, Request, Sampling, Sessions, Token, drafts
from txl_runtime.streaming.snapshot import StreamState

SAME = [1, 2, 3, 1, 2, 3, 1, 2]
GREEDY = Sampling(0.0, lookup=4)
PLAIN = Sampling(0.0)


def exact() -> Any:
    model = speaking(("B", "L"), (5, 4, 3, 2, 1))
    model.stepwise = 5
    return model


MODELS = {"counting": lambda: counting((5, 1)), "padded": lambda: counting((8, 1)), "exact": exact}


@pytest.fixture(scope="module")
def opened(tmp_path_factory, make_bundle) -> Callable[[str], Model]:
    def find(name: str) -> Model:
        path = tmp_path_factory.mktemp("models") / "b.txl"
        written = windowed(make_bundle, path) if name == "window" else MODELS[name]().write(path)
        return load(written, "cpu", threads=1)

    return functools.cache(find)


@pytest.fixture(autouse=True)
def eager(monkeypatch) -> None:
    monkeypatch.setattr(drafts, "Pace", Eager)


def seen(state: StreamState) -> list[float]:
    """Return the number of times that a sequence of the counting model has read each token."""
    assert state.states is not None
    return np.ravel(state.states["seen"]).tolist()


def requests(words: int) -> st.SearchStrategy[Request]:
    few = st.lists(st.integers(0, 2), min_size=1, max_size=12)
    sampling = st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
        top_k=st.sampled_from([None, 1, 4]),
        top_p=st.sampled_from([None, 0.3, 0.9]),
        seed=st.integers(0, 99),
        sequence=st.integers(0, 2),
        lookup=st.sampled_from([0, 1, 4, 4]),
    )
    return st.builds(
        Request,
        tokens=st.one_of(few, st.lists(st.integers(0, words - 1), min_size=1, max_size=20)),
        max_new_tokens=st.sampled_from([0, 1, 2, 9, 20]),
        sampling=sampling,
        stop_tokens=st.sampled_from([(), (), (1,), (3, 7)]),
        top_logprobs=st.sampled_from([None, 0, 2]),
        score=st.booleans(),
        memory_length=st.sampled_from([None, None, 3]) if words > 11 else st.none(),
    )


@pytest.mark.parametrize("kind", [*MODELS, "window"])
def test_sessions_with_drafts_give_what_each_gives_alone(opened, kind):
    model, kept = opened(kind), 0
    words = model.vocab_size

    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def some(data: st.DataObject) -> None:
        nonlocal kept
        rows = data.draw(st.integers(1, 3), "rows")
        queues = data.draw(st.lists(st.lists(requests(words), min_size=1, max_size=3), min_size=1, max_size=5))
        with Sessions(model, rows=rows) as sessions:
            tickets = []
            for number, queue in enumerate(queues):
                tickets.append([sessions.submit(request, f"s{number}") for request in queue])
                for _ in range(data.draw(st.integers(0, 6))):
                    sessions.round()
            run(sessions)
            fed = tokens = 0
            for number, (queue, done) in enumerate(zip(queues, tickets, strict=True)):
                wanted = alone(model, queue)
                for expected, ticket in zip(wanted, done, strict=True):
                    assert_same(gathered(ticket.events()), expected)
                    tokens += len(expected.drawn)
                    fed += expected.fed
                info = sessions.info(f"s{number}")
                last = wanted[-1].drawn[-1] if wanted[-1].drawn else None
                assert (info.seen, info.pending) == (sum(expected.fed for expected in wanted), last)
            counters = sessions.counters
            assert (counters.positions, counters.tokens) == (fed, tokens)
            assert counters.drafted >= counters.kept
            kept += counters.kept

    some()
    assert kept > 40, "no draft came true"


@pytest.mark.parametrize("most", [1, 2, 4])
def test_a_sure_session_takes_a_round_for_each_draft_and_one_more_token(opened, most):
    with Sessions(opened("counting")) as sessions:
        ticket = sessions.submit(Request(SAME, 41, Sampling(0.0, lookup=most)))
        rounds = run(sessions)
        assert len(drawn(ticket)) == 41
        assert rounds <= 41 // (most + 1) + 6
        assert sessions.counters.kept == 41 - sessions.counters.rounds + 1  # the prompt took two rounds


def test_a_neighbour_without_lookup_does_not_wait_for_drafts(opened):
    with Sessions(opened("counting")) as sessions:
        quick = sessions.submit(Request(SAME, 20, GREEDY), "a")
        slow = sessions.submit(Request(SAME, 20, PLAIN), "b")
        for _ in range(9):
            sessions.round()
        assert sessions.info("a").seen == sessions.info("b").seen == len(SAME) + 7
        run(sessions)
        assert not sessions.counters.drafted
        assert drawn(quick) == drawn(slow)


def test_a_neighbour_whose_text_is_new_does_not_wait_for_drafts(opened):
    """It looks drafts up and finds none: 3 tokens never come twice."""
    new = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 2, 4, 6, 8, 1, 3, 5, 7, 9]
    told = Sampling(0.0, lookup=4, allow=lambda tokens: [new[len(tokens)]])
    with Sessions(opened("counting")) as sessions:
        quick = sessions.submit(Request(SAME, 16, GREEDY), "a")
        slow = sessions.submit(Request(new[:4], 16, told), "b")
        run(sessions)
        assert not sessions.counters.drafted
        assert (len(drawn(quick)), drawn(slow)) == (16, new[4:])


def test_the_session_that_gains_least_decides_what_a_round_of_drafts_saved(opened, monkeypatch):
    counted: list[float] = []

    class Noted(Eager):
        def count(self, draft: bool = False, steps: float = 1) -> None:
            counted.extend([steps] * draft)

    monkeypatch.setattr(drafts, "Pace", Noted)
    turns = Sampling(0.0, lookup=4, allow=lambda tokens: [1 + len(tokens) % 3])
    broken = Sampling(0.0, lookup=4, allow=lambda tokens: [9 if len(tokens) == len(SAME) + 1 else 1 + len(tokens) % 3])
    with Sessions(opened("counting")) as sessions:
        for name, sampling in (("a", turns), ("b", broken)):
            sessions.submit(Request(SAME, 20, sampling), name)
        run(sessions)
    assert counted[0] == 1, "the draft of one came true, that of the other did not"
    assert max(counted) > 1


def test_a_chat_finds_what_was_said_before(opened):
    said = [4, 9, 5, 8, 6, 7, 3, 0]
    found = []
    for most in (0, 4):
        with Sessions(opened("window")) as sessions:
            sessions.submit(Request(said, 1, Sampling(0.0, lookup=most, allow=[4])), "a")
            run(sessions)
            chain = Sampling(0.0, lookup=4, allow=lambda tokens: [said[said.index(tokens[-1]) + 1 - len(said)]])
            then = sessions.submit(Request([9], 7, chain), "a")
            run(sessions)
            assert drawn(then) == [5, 8, 6, 7, 3, 0, 4]
            found.append(sessions.counters.kept)
    assert found == [0, 4]


def test_what_sessions_read_is_bounded(opened):
    with Sessions(opened("counting"), rows=1) as sessions:
        for number in range(5):
            sessions.submit(Request(SAME, 9, GREEDY), f"s{number}")
        run(sessions)
        assert [session.name for session in sessions._segments._drafts._read] == ["s3", "s4"]


@pytest.mark.parametrize("unread", range(4, 9))
def test_unread_events_pause_a_request_in_the_middle_of_a_draft(opened, unread):
    with Sessions(opened("counting")) as sessions:
        ticket = sessions.submit(Request(SAME, 20, GREEDY), "a", unread=unread)
        run(sessions)
        assert (ticket.unread, sessions.info("a").seen) == (unread, len(SAME) + unread - 1)
        found = drawn(ticket)
        while run(sessions):
            found += drawn(ticket)
        assert found == alone(opened("counting"), [Request(SAME, 20, PLAIN)])[0].drawn


def test_until_is_asked_once_for_each_token_and_ends_a_request(opened):
    model, asked = opened("counting"), list[int]()

    def until(token: int) -> bool:
        asked.append(token)
        return len(asked) == 12

    with Sessions(model) as sessions:
        ticket = sessions.submit(Request(SAME, 40, GREEDY, until=until), "a")
        run(sessions)
        *tokens, end = ticket.events()
        assert [token.id for token in tokens] == asked
        assert (len(asked), end.reason, end.fed) == (12, "stop", len(SAME) + 11)
        assert sessions.info("a").pending == asked[-1]


@pytest.mark.parametrize("stop", [5, 8, 6, 7])
def test_a_stop_token_ends_a_request_inside_a_draft(opened, stop):
    said, found = [4, 9, 5, 8, 6, 7, 3, 0], []
    for most in (0, 4):
        chain = Sampling(0.0, lookup=most, allow=lambda tokens: [said[said.index(tokens[-1]) + 1 - len(said)]])
        with Sessions(opened("counting")) as sessions:
            ticket = sessions.submit(Request([0, *said, 4], 9, chain, stop_tokens=[stop]), "a")
            run(sessions)
            assert sessions.counters.drafted > 0 or not most
            found.append(([*ticket.events()], sessions.info("a").seen, sessions.info("a").pending))
    assert found[0] == found[1]


def failing(kind: str, error: type[BaseException], at: int) -> dict[str, Any]:
    """Fields of a request whose function fails at a drawn token."""
    calls = []

    def called(*told: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise error("no")
        return told[0] if kind == "adjust" else False

    if kind == "until":
        return {"sampling": GREEDY, "until": called}
    return {"sampling": Sampling(0.0, lookup=4, adjust=called)}


@pytest.mark.parametrize("kind", ["adjust", "until"])
@pytest.mark.parametrize("at", range(1, 13))
@pytest.mark.parametrize("model", ["counting", "window"])
def test_a_function_that_fails_ends_its_request_alone(opened, kind, at, model):
    with Sessions(opened(model)) as sessions:
        ill = sessions.submit(Request(SAME, 20, **failing(kind, ValueError, at)), "a")
        beside = [
            sessions.submit(Request(SAME, 20, sampling), name) for sampling, name in ((GREEDY, "b"), (PLAIN, "c"))
        ]
        run(sessions)
        assert isinstance(ill.error, UsageError)
        *tokens, end = ill.events()
        assert (len(tokens), end.fed) == (
            (at - 1, len(SAME) + at - 1) if kind == "adjust" else (at, len(SAME) + at - 1)
        )
        info = sessions.info("a")
        assert (info.seen, info.pending) == (end.fed, tokens[-1].id if kind == "until" else None)
        expected = alone(opened(model), [Request(SAME, 20, PLAIN)])[0]
        for ticket in beside:
            assert_same(gathered(ticket.events()), expected)
        after = sessions.submit(Request([5], 9, GREEDY), "a")
        run(sessions)
        before = [*SAME, *(token.id for token in tokens)]
        assert drawn(after) == alone(opened(model), [Request([*before, 5], 9, PLAIN)])[0].drawn, "memory is whole"


@pytest.mark.parametrize("at", range(1, 13))
def test_an_interrupt_leaves_every_session_with_what_was_told(opened, at):
    model = opened("counting")
    with Sessions(model) as sessions:
        tickets = {"a": sessions.submit(Request(SAME, 20, **failing("adjust", KeyboardInterrupt, at)), "a")}
        tickets["b"] = sessions.submit(Request(SAME, 20, GREEDY), "b")
        tickets["c"] = sessions.submit(Request(SAME, 20, PLAIN), "c")
        with pytest.raises(KeyboardInterrupt):
            run(sessions)
        run(sessions)
        for name, ticket in tickets.items():
            *tokens, end = ticket.events()
            if ticket.error is not None:
                assert "the draw was interrupted" in str(ticket.error)
            assert (end.reason == "error") == (ticket.error is not None)
            told = [*SAME, *(token.id for token in tokens)]
            pending = sessions.info(name).pending
            assert sessions.info(name).seen == end.fed == len(told) - (pending is not None)
            sessions.submit(Request([5], 1, PLAIN), name)
            run(sessions)
            stream = model.stream(1)
            stream.feed([[*told, 5]])
            assert seen(sessions.take(name).state) == seen(stream.snapshot()), name
        assert tickets["a"].error is not None


@pytest.mark.parametrize("way", ["cancel", "close", "neighbour", "named neighbour"])
def test_a_function_that_ends_requests_leaves_the_others_whole(opened, way):
    model, count = opened("counting"), []

    def until(token: int) -> bool:
        count.append(token)
        if len(count) == 9:
            if way == "close":
                sessions.close("a")
            ended.cancel()
        return False

    with Sessions(model) as sessions:
        beside = sessions.submit(Request(SAME, 20, GREEDY), "b")
        other = sessions.submit(Request(SAME, 20, GREEDY), "c" if way.startswith("named") else None)
        ticket = sessions.submit(Request(SAME, 20, GREEDY, until=until), "a" if way == "close" else None)
        ended = other if "neighbour" in way else ticket
        run(sessions)
        expected = alone(model, [Request(SAME, 20, PLAIN)])[0]
        for asked in {ticket, other, beside} - {ended}:
            assert_same(gathered(asked.events()), expected)
        *tokens, end = ended.events()
        assert all(isinstance(token, Token) for token in tokens)
        assert isinstance(end, Finished)
        stream = model.stream(1)
        stream.feed([[*SAME, *expected.drawn[:-1]]])
        assert seen(sessions.take("b").state) == seen(stream.snapshot())


def test_nan_ends_one_session_and_no_neighbour(opened, monkeypatch):
    model = opened("window")
    with Sessions(model) as sessions:
        sessions.submit(Request(SAME, 3, PLAIN), "ill")
        run(sessions)
        state = sessions.take("ill")
        for tensor in state.state.memory.values():
            tensor[...] = np.nan
        sessions.put("ill", state)
        ill = sessions.submit(Request(SAME, 20, GREEDY), "ill")
        well = sessions.submit(Request(SAME, 20, GREEDY), "well")
        run(sessions)
        assert "produced NaN" in str(ill.error)
        assert sessions.names() == ["well"]
        assert_same(gathered(well.events()), alone(model, [Request(SAME, 20, PLAIN)])[0])


def test_where_a_part_cannot_run_again_the_sessions_are_what_they_were_before(opened, monkeypatch):
    """The engine fails for the second segment of a round: the one that runs the kept part again."""
    model = opened("counting")
    with Sessions(model) as sessions:
        untrue = Sampling(0.0, lookup=4, allow=lambda tokens: [3 if len(tokens) == len(SAME) else 9])
        tickets = [sessions.submit(Request(SAME, 20, untrue), name) for name in ("a", "b")]
        for _ in range(2):
            sessions.round()
        loop, run_segment = sessions._segments.stream.loop, sessions._segments.stream.loop.run
        left: dict[str, Any] = {}

        def failing_run(inputs: Any, counts: Any, want: Any = "rows", commit: bool = True) -> Any:
            if left:
                raise BackendError("the engine is gone")
            if not commit:
                left.update({name: sessions.take(name) for name in ("a", "b")})
            return run_segment(inputs, counts, want, commit)

        monkeypatch.setattr(loop, "run", failing_run)
        run(sessions)
        monkeypatch.undo()
        for name, ticket in zip(("a", "b"), tickets, strict=True):
            assert str(ticket.error) == "the engine is gone"
            found, before = sessions.take(name), left[name]
            assert (found.seen, found.pending) == (before.seen, before.pending)
            assert seen(found.state) == seen(before.state)


def test_a_look_that_fails_in_a_draft_leaves_the_session_of_before_the_round(opened, monkeypatch):
    """A caller's function takes its own session, and the engine fails where the part so far runs again."""
    with Sessions(opened("counting"), rows=1) as sessions:
        stream = sessions._segments.stream
        run_segment, left = stream.loop.run, dict[str, Any]()

        def failing_run(inputs: Any, counts: Any, want: Any = "rows", commit: bool = True) -> Any:
            if not commit:
                left.setdefault("seen", sessions.info("a").seen)
            elif stream.open is None and "seen" in left:
                raise BackendError("the engine is gone")
            return run_segment(inputs, counts, want, commit)

        def looking(row: np.ndarray, tokens: np.ndarray) -> np.ndarray:
            if stream.open is not None and stream.open.counts[0] == 3:
                sessions.take("a")
            return row

        ticket = sessions.submit(Request(SAME, 40, Sampling(0.0, lookup=4, adjust=looking)), "a")
        monkeypatch.setattr(stream.loop, "run", failing_run)
        run(sessions)
        monkeypatch.undo()
        assert "the engine is gone" in str(ticket.error) or "was to be kept" in str(ticket.error)
        found = sessions.take("a")
        assert found.seen == left["seen"] == round(sum(seen(found.state)) - 5.5), "the counts begin at 0 … 1"


def test_drafts_pause_where_they_lose(opened, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(drafts, "Pace", lambda: drafts_pace(lambda: now[0]))
    with Sessions(opened("counting")) as sessions:
        loop, run_segment = sessions._segments.stream.loop, sessions._segments.stream.loop.run

        def slow(inputs: Any, counts: Any, want: Any = "rows", commit: bool = True) -> Any:
            now[0] += 1 if commit else 20
            return run_segment(inputs, counts, want, commit)

        monkeypatch.setattr(loop, "run", slow)
        sessions.submit(Request(SAME, 200, GREEDY))
        run(sessions)
        assert 0 < sessions.counters.drafted <= 4 * 4, "two drafts that are not judged, and two more"


drafts_pace = drafts.Pace


@pytest.mark.parametrize(
    ("lookup", "said"),
    [
        (5, "lookup is 5, expected a whole number of 0 … 4; 0 is off"),
        ("4", "lookup is '4', expected a whole number of 0 … 4; 0 is off"),
        (4, "lookup is 4, expected 0, because the bundle does not say that a segment is as many steps"),
    ],
)
def test_a_lookup_is_refused_by_name_when_it_is_submitted(model_of, lookup, said):
    with Sessions(model_of("ring")) as sessions:
        with pytest.raises(UsageError, match=said):
            sessions.submit(Request([1], 4, Sampling(lookup=lookup)))
        assert sessions.unfinished == 0
