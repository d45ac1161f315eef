"""A fault hurts the one whose it is; states come and go whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sessions_alone import alone, assert_same, run
from sessions_alone import given as gathered
from txl_runtime import BackendError, TxlError, UsageError
from txl_runtime.sessions import Finished, Request, Sampling, Sessions

# --- what goes wrong ----------------------------------------------------------------------------------------------


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize("error", [BackendError("the device is gone"), ValueError("of a fault")], ids=str)
def test_an_engine_s_error_ends_the_requests_of_that_round_and_leaves_their_states(
    model_of, error, caplog, rounds, monkeypatch
):
    """A round of the long prompt, or one of those that decode."""
    with Sessions(model_of("counting")) as sessions:
        decoding = [sessions.submit(Request([1], 9, Sampling(seed=1)), f"s{number}") for number in range(2)]
        sessions.round()
        prompt = sessions.submit(Request([1] * 9, 3, Sampling(seed=2)), "prompt")
        for _ in range(rounds):
            sessions.round()
        states = [sessions.take(f"s{number}") for number in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(sessions._segments.stream.loop, "run", failing(error))
            sessions.round()
        hurt, spared = (decoding, [prompt]) if rounds else ([prompt], decoding)
        assert all(ticket.done for ticket in hurt)
        for ticket in hurt:
            assert ticket.events()[-1].reason == "error"
            assert str(error) in str(ticket.error)
            assert isinstance(ticket.error, BackendError)
        run(sessions)
        assert all(ticket.error is None for ticket in spared)
        if hurt is decoding:
            for number, before in enumerate(states):
                after = sessions.take(f"s{number}")
                assert (after.seen, after.pending) == (before.seen, before.pending)
                np.testing.assert_array_equal(after.state.states["seen"], before.state.states["seen"])
        assert bool(caplog.records) == isinstance(error, ValueError)


@pytest.mark.parametrize("options", [{}, {"top_logprobs": 2}, {"score": True}, {"score": True, "top_logprobs": 1}])
@pytest.mark.parametrize("tokens", [[3], [3] * 7])
def test_a_session_of_nan_ends_alone(model_of, options, tokens):
    model = model_of("counting")
    with Sessions(model) as sessions:
        sessions.submit(Request([1]), "ill")
        run(sessions)
        state = sessions.take("ill")
        state.state.states["seen"][...] = np.nan
        sessions.put("ill", state)
        ill = [sessions.submit(Request(tokens, 3, Sampling(0.0), **options), "ill") for _ in range(2)]
        request = Request([1, 2, 3], 5, Sampling(seed=1), top_logprobs=1)
        well = [sessions.submit(request, name) for name in ("well", "fine")]
        run(sessions)
        assert [ticket.events()[-1].reason for ticket in ill] == ["error", "error"]
        assert "session 'ill' produced NaN, expected log-probabilities; it was closed, begin it again" in str(
            ill[0].error
        )
        (expected,) = alone(model, [request])
        for ticket in well:
            assert_same(gathered(ticket.events()), expected)
        assert sessions.names() == ["well", "fine"]
        again = sessions.submit(request, "ill")
        run(sessions)
        assert_same(gathered(again.events()), expected)


def test_memory_that_was_left_half_replaced_is_not_believed(model_of, monkeypatch):
    """An interrupt in the middle of a state's way to a row."""
    with Sessions(model_of("counting"), rows=2) as sessions:
        for name in "abc":
            sessions.submit(Request([1], 2, Sampling(seed=1)), name)
        run(sessions)
        parked = next(name for name in "abc" if sessions.info(name).place == "host")
        monkeypatch.setattr(sessions._rows._stream.loop, "put", failing(KeyboardInterrupt()))
        tickets = {name: sessions.submit(Request([1], 2, Sampling(seed=1)), name) for name in "abc"}
        with pytest.raises(KeyboardInterrupt):
            run(sessions)
        monkeypatch.undo()
        run(sessions)
        assert tickets[parked].events()[-1] == Finished("length", 1 + 1 + 1), "what was on its way is where it was"
        again = {name: sessions.submit(Request([1], 2), name) for name in "abc"}
        run(sessions)
        told = [str(ticket.error) for ticket in (*tickets.values(), *again.values()) if ticket.error is not None]
        assert len(told) == 1, "the one that was on the other row is told, once"
        assert "is lost, because the stream was left half changed; begin it again" in told[0]
        assert len(sessions.names()) == 2


def test_nothing_comes_of_memory_that_an_engine_left_half_replaced(model_of, monkeypatch):
    with Sessions(model_of("counting"), rows=2) as sessions:
        for name in "abc":
            sessions.submit(Request([1], 2, Sampling(seed=1)), name)
        run(sessions)
        (parked,) = (name for name in "abc" if sessions.info(name).place == "host")
        stays = next(name for name in "abc" if sessions.info(name).place == "row")
        monkeypatch.setattr(sessions._rows._stream.loop, "put", failing(BackendError("the device is gone")))
        hurt = sessions.submit(Request([1], 9), stays)
        late = sessions.submit(Request([1], 1), parked)
        before = sessions.take(parked)
        assert sessions.round()
        monkeypatch.undo()
        assert "the device is gone" in str(late.error)
        assert not hurt.events(), "nothing ran on what was left"
        with pytest.raises(TxlError, match=f"session '{stays}' is lost, because the stream was left half changed"):
            sessions.take(stays)
        np.testing.assert_array_equal(sessions.take(parked).state.states["seen"], before.state.states["seen"])
        run(sessions)
        assert [event.reason for event in hurt.events()] == ["error"]
        assert parked in sessions


# --- states -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["counting", "ring"])
def test_a_state_that_is_taken_goes_on_elsewhere(model_of, kind):
    model = model_of(kind)
    request = Request([1, 2, 3, 4, 5, 6], 4, Sampling(0.9, seed=1), top_logprobs=1)
    expected = alone(model, [request, request])
    with Sessions(model) as ours, Sessions(model, rows=1) as theirs:
        first = ours.submit(request, "anna")
        run(ours)
        assert_same(gathered(first.events()), expected[0])
        theirs.put("berta", ours.take("anna"))
        assert theirs.info("berta").seen == ours.info("anna").seen == 9
        for sessions, name in ((ours, "anna"), (theirs, "berta")):
            second = sessions.submit(request, name)
            run(sessions)
            assert_same(gathered(second.events()), expected[1])
        with pytest.raises(UsageError, match="the state is a str"):
            ours.put("anna", "a state")
        ours.submit(request, "anna")
        with pytest.raises(UsageError, match="session 'anna' has a request, expected one without; wait for its end"):
            ours.put("anna", theirs.take("berta"))


def test_what_is_taken_is_a_copy(model_of):
    with Sessions(model_of("counting"), rows=1) as sessions:
        for name in ("parked", "placed"):
            sessions.submit(Request([1, 2]), name)
            run(sessions)
        for name, place in (("parked", "host"), ("placed", "row")):
            assert sessions.info(name).place == place
            before = sessions.take(name)
            before.state.states["seen"][...] = 5
            assert not (sessions.take(name).state.states["seen"] == 5).all()
            given = sessions.take(name)
            sessions.put(name, given)
            given.state.states["seen"][...] = 7
            assert not (sessions.take(name).state.states["seen"] == 7).all()


def test_a_session_that_nothing_was_fed_to_has_the_state_of_a_fresh_stream(model_of):
    model = model_of("counting")
    with Sessions(model) as sessions:
        sessions.submit(Request([1]), "anna")
        assert sessions.info("anna").place == "new"
        state = sessions.take("anna")
        np.testing.assert_array_equal(state.state.states["seen"], model.stream(1).state()["seen"])
        assert (state.seen, state.pending) == (0, None)


def test_versions_change_with_the_state_alone(model_of):
    with Sessions(model_of("counting")) as sessions:
        for name in ("a", "b"):
            sessions.submit(Request([1]), name)
        run(sessions)
        before = sessions.versions()
        assert list(before) == sessions.names()
        sessions.submit(Request([1], 1), "a")
        run(sessions)
        after = sessions.versions()
        assert list(after) == ["b", "a"]
        assert (after["b"], after["a"] != before["a"]) == (before["b"], True)
        sessions.close("a")
        sessions.submit(Request([1], 1), "a")
        assert sessions.versions()["a"] not in (before["a"], after["a"])
