"""Requests that generate, beside streams of their own; the server is a stand-in."""

from __future__ import annotations

import contextlib
import json
from threading import Event

import numpy as np
import pytest
import txl_runtime
from stand_ins import triton_server
from stand_ins.triton_server import Request
from step_models import counting
from support import until
from txl_runtime.sessions import Limits, Sessions

from txl_deploy.triton.inside.generating import Generating, open_model

EVERYTHING = ("tokens", "logprobs", "finish_reason")


@pytest.fixture
def model(tmp_path):
    return txl_runtime.load(counting().write(tmp_path / "counting.txl"), backend="cpu")


@pytest.fixture
def served(model):
    with contextlib.closing(Generating(Sessions(model, limits=Limits(sessions=8)), triton_server)) as made:
        yield made


def ask(tokens, count, name=0, wanted=EVERYTHING, start=False, end=False, sender=None, **options):
    kinds = {"temperature": np.float32, "top_p": np.float32, "seed": np.int64}
    inputs = {key: np.array(np.atleast_1d(value), kinds.get(key, np.int32)) for key, value in options.items()}
    inputs |= {"tokens": np.array(tokens, np.int32), "max_new_tokens": np.array([count], np.int32)}
    return Request(name, inputs, wanted, start, end, sender or triton_server.Sender())


def answered(served, *requests, of=None):
    """Return the answers of each request, or of some: its ids, its log-probabilities, its end."""
    assert served.execute(requests) is None
    until(lambda: all(request.sender.ended for request in of or requests))
    found = []
    for request in of or requests:
        parts = [response.arrays for response in request.sender.sent]
        reasons = [part["finish_reason"][0] for part in parts]
        assert not any(reasons[:-1])
        found.append([np.concatenate([part[name] for part in parts]) for name in EVERYTHING[:2]] + [reasons[-1]])
    return found


def refused(served, request):
    served.execute([request])
    until(lambda: request.sender.ended)
    return request.sender.sent[-1].error


class Unreachable(triton_server.Sender):
    """A client whose responses the server does not take: the first `count` of them, or looks at whether it is gone."""

    def __init__(self, count, look=False):
        super().__init__()
        self.left, self.look = count, look

    def send(self, response=None, flags=0):
        self.left -= 1
        if self.left >= 0:
            raise triton_server.TritonModelException("no room for it in the shared memory")
        super().send(response, flags)

    def is_cancelled(self):
        if self.look:
            raise triton_server.TritonModelException("the stub is gone")
        return False


class Held(triton_server.Sender):
    """A client that takes its first response and then holds the rounds up until it is let go."""

    def __init__(self):
        super().__init__()
        self.let_go = Event()

    def send(self, response=None, flags=0):
        super().send(response, flags)
        assert self.let_go.wait(60)


def test_many_at_once_get_what_a_stream_alone_draws(model, served):
    draws = np.random.default_rng(0)
    prompts = [draws.integers(0, 11, int(draws.integers(1, 10))) for _ in range(10)]
    options = [{"temperature": 0.0}, {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "seed": 3}]
    requests = [ask(ids, 12, **options[place % 2]) for place, ids in enumerate(prompts)]
    for place, (ids, (tokens, logprobs, reason)) in enumerate(zip(prompts, answered(served, *requests), strict=True)):
        stream = model.stream(1)
        expected = [int(token[0]) for token in stream.generate(ids, 12, **options[place % 2])]
        assert tokens.tolist() == expected
        assert reason == b"length"
        stream.reset()
        rows = stream.feed([[*ids, *expected]])[0, len(ids) - 1 : -1]
        np.testing.assert_allclose(logprobs, rows[np.arange(12), expected], atol=1e-5)
    assert [len(response.arrays["tokens"]) for response in requests[0].sender.sent] == [1] * 12


def test_a_correlation_id_goes_on_until_start_or_end(model, served):
    stream = model.stream(1)
    stream.feed([[1, 2, 3]])
    (first,) = answered(served, ask([1, 2, 3], 2, name=7, temperature=0.0))
    alone = model.stream(1)
    expected = [int(token[0]) for token in alone.generate([1, 2, 3], 2, temperature=0.0)]
    assert first[0].tolist() == expected
    (second,) = answered(served, ask([4], 2, name=7, temperature=0.0, end=True))
    stream.reset()
    assert second[0].tolist() == [
        int(token[0]) for token in stream.generate([1, 2, 3, *expected, 4], 2, temperature=0.0)
    ]
    for flags in ({}, {"start": True}):
        (fresh,) = answered(served, ask([1, 2, 3], 2, name=7, temperature=0.0, **flags))
        assert fresh[0].tolist() == expected
        np.testing.assert_allclose(fresh[1], first[1], atol=1e-5)  # tokens alone would not tell what was there before


def test_end_frees_the_session(served):
    answered(served, ask([1], 2, name=7), ask([1], 2, name=8, end=True))
    until(lambda: len(served._sessions.names()) == 1)
    answered(served, ask([1], 2, name=7, end=True))
    until(lambda: not served._sessions.names())
    answered(served, ask([1], 2, name=7))
    assert "tokens hold id 11" in refused(served, ask([11], 2, name=7, end=True)).message
    until(lambda: not served._sessions.names())


@pytest.mark.parametrize("start", [True, False])
def test_end_closes_no_session_but_its_own(served, start):
    """The next request of the id comes while the one with END still runs."""
    (alone,) = answered(served, ask([1, 2, 3], 5, temperature=0.0))
    before = ask([1, 2], 200, name=7, temperature=0.0, start=True, end=True, sender=Held())
    served.execute([before])
    until(lambda: before.sender.sent)
    following = ask([1, 2, 3], 5, name=7, temperature=0.0, start=start)
    served.execute([following])
    before.sender.let_go.set()
    (after,) = answered(served, of=[following])
    assert (after[0].tolist(), after[2]) == (alone[0].tolist(), b"length")
    np.testing.assert_allclose(after[1], alone[1], atol=1e-5)
    until(lambda: before.sender.ended)
    assert before.sender.sent[-1].arrays["finish_reason"][0] == (b"closed" if start else b"length")
    until(lambda: len(served._sessions.names()) == 1)


def test_numbers_that_say_nothing_and_seeds_below_zero_mean_what_serve_takes_them_for(served):
    nothing = ({}, {"top_k": 0}, {"top_k": -1}, {"top_p": 1.0})
    plain, *others = answered(served, *(ask([1], 12, seed=5, **more) for more in nothing))
    assert [other[0].tolist() for other in others] == [plain[0].tolist()] * 3
    below, same, other = answered(served, *(ask([1], 30, seed=seed) for seed in (-1, (1 << 63) - 1, 1)))
    assert below[0].tolist() == same[0].tolist() != other[0].tolist()


def test_an_empty_prompt_is_the_boundary_token_where_the_session_is_new(tmp_path):
    path = counting().write(tmp_path / "counting.txl")
    document = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(document | {"boundary_token": 9}))
    parameters = {"backend": "cpu", "threads": "1", "sessions": "8", "idle_seconds": "60"}
    with contextlib.closing(open_model(path, parameters, triton_server)) as served:
        expected, empty = answered(served, *(ask(ids, 3, temperature=0.0) for ids in ([9], [])))
        assert empty[0].tolist() == expected[0].tolist()
        np.testing.assert_allclose(empty[1], expected[1], atol=1e-5)
        (whole,) = answered(served, ask([], 6, temperature=0.0))
        first, more = (answered(served, ask([], 3, name=7, temperature=0.0))[0] for _ in range(2))
        assert [*first[0], *more[0]] == whole[0].tolist()
        np.testing.assert_allclose([*first[1], *more[1]], whole[1], atol=1e-5)  # no boundary in between


def test_it_ends_at_a_stop_token_and_sends_only_what_is_asked_for(model, served):
    stream = model.stream(1)
    expected = [int(token[0]) for token in stream.generate([5], 8, temperature=0.0)]
    (found,) = answered(served, ask([5], 8, temperature=0.0, stop_tokens=[expected[3]]))
    end = expected.index(expected[3]) + 1
    assert (found[0].tolist(), found[2]) == (expected[:end], b"stop")
    request = ask([5], 3, wanted=("tokens",))
    served.execute([request])
    until(lambda: request.sender.ended)
    assert [*request.sender.sent[0].arrays] == ["tokens"]


def test_what_is_wrong_is_said_to_the_client_alone(served):
    for request, said in (
        (ask([11], 3), "tokens hold id 11"),
        (ask([1], -1), "max_new_tokens is -1"),
        (ask([1], 3, top_p=1.5), "top_p"),
        (ask([], 3), "token"),
    ):
        error = refused(served, request)
        assert said in error.message
        assert error.code == triton_server.TritonError.INVALID_ARG
    for name in range(1, 9):
        answered(served, ask([1], 1, name=name))
    assert refused(served, ask([1], 1, name=9)).code == triton_server.TritonError.UNAVAILABLE


def test_a_client_that_goes_ends_its_request(served):
    request = ask([1], 900_000)
    served.execute([request])
    until(lambda: request.sender.sent)
    request.sender.cancelled = True
    until(lambda: request.sender.ended)
    assert request.sender.sent[-1].arrays["finish_reason"][0] == b"cancelled"


@pytest.mark.parametrize("sender", [Unreachable(10**9), Unreachable(1), Unreachable(0, look=True)])
def test_a_response_that_cannot_be_sent_ends_its_request_alone(served, sender):
    """Whoever runs beside it is answered to the end, and so is whoever comes later."""
    lost, beside = ask([1, 2], 900_000, name=8, sender=sender), ask([1], 200)
    (whole,) = answered(served, ask([1, 2], 1, name=9), lost, beside, of=[beside])
    assert (len(whole[0]), whole[2]) == (200, b"length")
    until(lambda: not served._sessions.unfinished)
    if sender.left < 0:
        assert sender.ended
        assert "a response could not be sent (TritonModelException: " in sender.sent[-1].error.message
    served.execute([ask([11], 3, sender=Unreachable(10**9))])  # a refusal, which cannot be sent either
    (later,) = answered(served, ask([3], 3))
    assert len(later[0]) == 3


def test_closing_ends_what_runs(model):
    served, request = Generating(Sessions(model), triton_server), ask([1], 900_000)
    served.execute([request])
    served.close()
    assert request.sender.ended
    assert request.sender.sent[-1].arrays["finish_reason"][0] == b"closed"


@pytest.mark.parametrize("fails", ["submit", "round"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_rounds_leaves_nobody_waiting(served, monkeypatch, fails):
    monkeypatch.setattr(served._sessions, fails, lambda *_: 1 // 0)
    first, lost, beside = ask([1], 5), ask([1], 5, sender=Unreachable(10**9)), ask([1], 5)
    served.execute([first, lost, beside])
    for each in (first, beside):
        until(lambda each=each: each.sender.ended)
        assert "rounds ended with ZeroDivisionError" in each.sender.sent[-1].error.message
    served._thread.join()
    assert "load the model again" in refused(served, ask([1], 5)).message
