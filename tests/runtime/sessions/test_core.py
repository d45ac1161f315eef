"""Sessions beside others give what each gives alone on one stream, whatever they are asked for."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sessions_alone import alone, assert_same, drawn, run
from sessions_alone import given as gathered
from step_models import VOCABULARY
from txl_runtime import Model, UsageError
from txl_runtime.sessions import Busy, Finished, Limits, Outputs, Request, Sampling, Sessions, Ticket, Token, joined

# --- the same as alone --------------------------------------------------------------------------------------------


def requests(words: int, longest: int) -> st.SearchStrategy[Request]:
    sampling = st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.7, 1.0, 1.9]),
        top_k=st.sampled_from([None, 1, 4, 1000]),
        top_p=st.sampled_from([None, 0.3, 0.9]),
        seed=st.integers(0, 99),
        sequence=st.integers(0, 2),
    )
    return st.builds(
        Request,
        tokens=st.lists(st.integers(0, words - 1), min_size=1, max_size=longest),
        max_new_tokens=st.integers(0, 6),
        sampling=sampling,
        stop_tokens=st.sampled_from([(), (1,), (3, 7)]),
        top_logprobs=st.sampled_from([None, 0, 2, 1000]),
        score=st.booleans(),
    )


def test_adjusted_requests_draw_what_a_stream_draws_and_a_failure_is_its_own(model_of):
    """Beside each other: a grammar that goes on over a pending token, masks, and a function that fails late."""
    model, told = model_of("counting"), list[list[int]]()

    def rising(tokens: np.ndarray) -> list[int]:
        told.append(tokens.tolist())
        return [(int(tokens[-1]) + 1) % VOCABULARY, (int(tokens[-1]) + 2) % VOCABULARY]

    def late(row: np.ndarray, tokens: np.ndarray) -> np.ndarray | None:
        return row if len(tokens) < 4 else None

    masks = {"forbid": [0, 3], "logit_bias": {5: 3.5}, "adjust": lambda row, tokens: row / 2}
    with Sessions(model) as sessions:
        first = sessions.submit(Request([1, 2], 3, Sampling(seed=1, allow=rising), top_logprobs=1), "a")
        then = sessions.submit(Request([7], 2, Sampling(seed=2, allow=rising)), "a")
        masked = sessions.submit(Request([4], 6, Sampling(seed=3, **masks)), "b")
        ill = sessions.submit(Request([1, 2], 9, Sampling(seed=1, adjust=late)), "c")
        run(sessions)
        stream = model.stream(1)
        generation = stream.generate([1, 2], 3, seed=1, allow=rising, logprobs=True)
        expected = [(int(token[0]), float(generation.logprobs[0])) for token in generation]
        events = [event for event in first.events() if isinstance(event, Token)]
        assert [event.id for event in events] == [token for token, _ in expected]
        np.testing.assert_allclose([event.logprob for event in events], [value for _, value in expected], atol=1e-5)
        again = [int(token[0]) for token in stream.generate([expected[-1][0], 7], 2, seed=2, allow=rising)]
        assert drawn(then) == again
        assert told[:5] == told[5:], "the pending token comes before the prompt"
        assert drawn(masked) == [int(token[0]) for token in model.stream(1).generate([4], 6, seed=3, **masks)]
        assert [type(event) for event in ill.events()] == [Token, Token, Finished]
        assert isinstance(ill.error, UsageError)
        assert "adjust returned None, expected float64 or float32" in str(ill.error)
        assert sorted(sessions.names()) == ["a", "b", "c"], "its memory is sound"
        assert drawn(sessions.submit(Request([1], 1, Sampling(0.0)), "c")) == []
        run(sessions)


def test_an_interrupt_in_a_callers_function_ends_the_draws_that_it_took(model_of):
    def late(row: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        if len(tokens) == 4:
            raise KeyboardInterrupt
        return row

    with Sessions(model_of("counting")) as sessions:
        ill = sessions.submit(Request([1, 2], 9, Sampling(seed=1, adjust=late)), "a")
        beside = sessions.submit(Request([1, 2], 9, Sampling(seed=1)), "b")
        with pytest.raises(KeyboardInterrupt):
            run(sessions)
        run(sessions)
        for ticket in (ill, beside):
            assert [type(event) for event in ticket.events()] == [Token, Token, Finished]
            assert "the draw was interrupted, expected a token; ask again with tokens" in str(ticket.error)
        after = sessions.submit(Request([3], 2, Sampling(seed=2)), "b")
        run(sessions)
        assert after.error is None


def compare(model: Model, data: st.DataObject, words: int, longest: int) -> None:
    rows = data.draw(st.integers(1, model.batch_size), "rows")
    given_to = data.draw(st.lists(st.lists(requests(words, longest), min_size=1, max_size=3), min_size=1, max_size=7))
    tickets: list[list[Ticket]] = [[] for _ in given_to]
    with Sessions(model, rows=rows) as sessions:
        left = [(number, request) for number, queue in enumerate(given_to) for request in queue]
        while left:
            number, request = left.pop(data.draw(st.integers(0, len(left) - 1)))
            request = given_to[number][len(tickets[number])]
            tickets[number].append(sessions.submit(request, session=f"s{number}"))
            for _ in range(data.draw(st.integers(0, 4))):
                sessions.round()
        run(sessions)
        assert sessions.unfinished == 0
        for queue, done in zip(given_to, tickets, strict=True):
            for expected, ticket in zip(alone(model, queue), done, strict=True):
                assert ticket.done
                assert ticket.error is None
                assert_same(gathered(ticket.events()), expected)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_sessions_of_a_step_give_what_each_gives_alone(model_of, data):
    compare(model_of("counting"), data, VOCABULARY, 14)


@pytest.mark.parametrize("kind", ["ring", "rolled", "clusters"])
def test_sessions_of_a_transformer_give_what_each_gives_alone(model_of, kind):
    @settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def some(data: st.DataObject) -> None:
        compare(model_of(kind), data, 41, 25)

    some()


@pytest.mark.parametrize("kind", ["words first", "time first", "one by one", "lockstep"])
def test_tokens_of_any_layout_are_fed_scored_and_continued(model_of, kind):
    model = model_of(kind)
    queues = [
        [Request([1, 2, 3, 4, 5, 6], 3, Sampling(0.0), score=True), Request([7], 2, Sampling(seed=3), top_logprobs=2)],
        [Request([9, 1, 4], 4, Sampling(0.8, seed=1))],
        [Request([2, 2], 1, Sampling(0.0)), Request([3], 3, Sampling(0.0))],
        [Request([5] * 9, 2, Sampling(1.0, 3, seed=5), top_logprobs=0)],
    ]
    with Sessions(model) as sessions:
        assert sessions.rows == (1 if kind == "lockstep" else 3)
        tickets = [[sessions.submit(request, f"s{i}") for request in queue] for i, queue in enumerate(queues)]
        run(sessions)
        for queue, done in zip(queues, tickets, strict=True):
            for expected, ticket in zip(alone(model, queue), done, strict=True):
                assert_same(gathered(ticket.events()), expected)


def test_a_request_without_a_name_ends_its_session(model_of):
    with Sessions(model_of("counting")) as sessions:
        request = Request([1, 2, 3], 3, Sampling(seed=1))
        tickets = [sessions.submit(request) for _ in range(5)]
        assert sessions.names() == []
        run(sessions)
        first, *others = [drawn(ticket) for ticket in tickets]
        assert len(first) == 3
        assert all(other == first for other in others), "nothing is left of one for the next on its row"
        assert sessions.counters.finished["length"] == 5
        assert (sessions.host_bytes, sessions.unfinished) == (0, 0)


# --- named arrays -------------------------------------------------------------------------------------------------


def fed(model: Model, inputs: dict[str, np.ndarray], last: bool = False) -> dict[str, np.ndarray]:
    return model.stream(1).feed(inputs, last=last)


def told(model: Model, ticket: Ticket) -> dict[str, np.ndarray]:
    """The outputs of all segments, along their positions."""
    *parts, end = ticket.events()
    assert end.reason == "length"
    assert all(isinstance(part, Outputs) for part in parts)
    return joined(parts, model.manifest.outputs)


def some_inputs(model: Model, columns: int, seed: int) -> dict[str, np.ndarray]:
    draws, found = np.random.default_rng(seed), {}
    for entry in model.manifest.inputs:
        if entry.role not in ("tokens", "feature"):
            continue
        shape = entry.sizes(1, columns)
        if entry.vocab is not None:
            found[entry.name] = draws.integers(0, entry.vocab, shape)
        else:
            found[entry.name] = (draws.normal(size=shape) > 0.9) if entry.dtype == "bool" else draws.normal(size=shape)
            found[entry.name] = found[entry.name].astype(entry.dtype)
    return found


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        ("recurrent", [9, 4, 1, 5, 8]),
        ("looking", [8, 4, 4, 12]),
        ("counting", [7, 4, 1, 10]),
        ("growing", [2, 6, 2]),
        ("fours", [4, 8, 4, 12]),
        ("rolled", [9, 1, 4, 6]),
        ("clusters", [9, 1, 4, 6]),
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_arrays_of_models_of_every_kind_give_what_a_stream_gives(model_of, kind, lengths, last):
    model = model_of(kind)
    given_to = [some_inputs(model, columns, seed) for seed, columns in enumerate(lengths)]
    with Sessions(model) as sessions:
        tickets = [
            sessions.submit(Request(inputs=inputs, last=last), f"s{number}") for number, inputs in enumerate(given_to)
        ]
        run(sessions)
        for inputs, ticket in zip(given_to, tickets, strict=True):
            assert ticket.error is None
            assert ticket.unread == 2 or not last
            expected, found = fed(model, inputs, last), told(model, ticket)
            assert found.keys() == expected.keys()
            for name, array in expected.items():
                assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
                np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-5)


def test_arrays_are_the_request_s_own(model_of):
    model = model_of("recurrent")
    inputs = some_inputs(model, 5, 1)
    expected = fed(model, inputs)
    with Sessions(model) as sessions:
        ticket = sessions.submit(Request(inputs=inputs))
        for array in inputs.values():
            array[...] = 0
        run(sessions)
        np.testing.assert_allclose(told(model, ticket)["best"], expected["best"], rtol=0, atol=1e-6)


def test_a_session_that_is_begun_anew_has_seen_nothing(model_of):
    model, limits = model_of("counting"), Limits(sessions=2)
    with Sessions(model, limits=limits) as sessions:
        running = sessions.submit(Request([1, 2], 3), "anna")
        sessions.round()
        for name in ("anna", "bea"):
            sessions.begin(name)
        assert (running.done, running.events()[-1].reason) == (True, "closed")
        assert [sessions.info(name).place for name in sessions.names()] == ["new", "new"]
        ticket = sessions.submit(Request(inputs={"tokens": [[5]]}), "anna")
        run(sessions)
        np.testing.assert_allclose(told(model, ticket)["logits"], fed(model, {"tokens": [[5]]})["logits"], atol=1e-5)
        with pytest.raises(Busy, match="there are 2 sessions"):
            sessions.begin("carl")
        with pytest.raises(UsageError, match="the session's name is ''"):
            sessions.begin("")


def test_arrays_wait_until_a_drawn_token_is_fed(model_of):
    with Sessions(model_of("counting")) as sessions:
        sessions.submit(Request([1], 1), "anna")
        late = sessions.submit(Request(inputs={"tokens": [[1]]}), "anna")
        run(sessions)
        assert "a token that was drawn and not fed yet, expected none before inputs" in str(late.error)
        with pytest.raises(UsageError, match="expected none before inputs; feed it with a request without tokens"):
            sessions.submit(Request(inputs={"tokens": [[1]]}), "anna")
        sessions.submit(Request(), "anna")
        fine = sessions.submit(Request(inputs={"tokens": [[1]]}), "anna")
        run(sessions)
        assert fine.error is None


def test_a_request_that_has_ended_is_freed_without_the_collector(model_of):
    """Its inputs may be large, and a server answers many of them between two runs of the collector."""
    sessions = Sessions(model_of("counting"), 1)
    gc.collect()
    gc.disable()
    try:
        ticket = sessions.submit(Request(inputs={"tokens": np.zeros((1, 2), np.int32)}), "a")
        (job,) = sessions._book.named["a"].jobs
        held = weakref.ref(job)
        del job
        while sessions.unfinished and sessions.round():
            pass
        assert ticket.done
        assert held() is None
    finally:
        gc.enable()
    ticket.cancel()
    assert isinstance(ticket.events()[-1], Finished)
