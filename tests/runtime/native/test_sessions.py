"""Sessions on the compiled step: rows that many share, states that move out and in, checkpoints for any backend."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx2
import numpy as np
import pytest
from frozen import frozen
from native_steps import best, compiled, pair
from resealing import copied, reseal
from serving import serving
from sessions_alone import Given, alone, assert_same, given, run
from txl_engines.native import build_native
from txl_runtime import load
from txl_runtime.sessions import Request, Sampling, Sessions
from txl_runtime.sessions.checkpoint import restore_sessions, save_sessions


def requests(words: int) -> Iterator[tuple[str, Request]]:
    """Requests of more sessions than there are rows, of different lengths, each session's second after all firsts."""
    rng = np.random.default_rng(0)
    for turn in range(2):
        for number in range(7):
            tokens = rng.integers(0, words, 1 + 3 * number % 11).tolist()
            sampling = Sampling(temperature=0.8 * (number % 2), seed=number)
            yield f"s{number}", Request(tokens, 4 + number, sampling, top_logprobs=1, score=bool(turn))


@pytest.mark.parametrize("cache", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["ring", "clusters", "int8"])
def test_sessions_beside_others_give_what_each_gives_alone(name, cache):
    model = pair(frozen(name), cache=cache)[1]
    asked = list(requests(model.vocab_size))
    with Sessions(model) as sessions:
        tickets = [(session, sessions.submit(request, session)) for session, request in asked]
        run(sessions)
        found = dict[str, list[Given]]()
        for session, ticket in tickets:
            found.setdefault(session, []).append(given(ticket.events()))
    assert len(found) > model.batch_size, "states leave the rows and come back"
    for session, results in found.items():
        for one, expected in zip(results, alone(model, [r for s, r in asked if s == session]), strict=True):
            assert_same(one, expected)


@pytest.mark.parametrize("first", [0, 1])
def test_a_checkpoint_of_one_engine_goes_on_in_the_other(first, tmp_path):
    models = pair(frozen("ring"))
    before, after = models[first], models[1 - first]
    with Sessions(before) as sessions:
        for number in range(5):
            sessions.submit(Request([number, 3, 8], 3, Sampling(0.0)), f"s{number}")
        run(sessions)
        save_sessions(sessions, tmp_path / "saved", before.manifest.model_id)
        wanted = [sessions.submit(Request([2], 5, Sampling(0.0)), f"s{number}") for number in range(5)]
        run(sessions)
        expected = [given(ticket.events()) for ticket in wanted]
    with Sessions(after) as sessions:
        assert restore_sessions(sessions, tmp_path / "saved", after.manifest.model_id) == {}
        goes_on = [sessions.submit(Request([2], 5, Sampling(0.0)), f"s{number}") for number in range(5)]
        run(sessions)
        for ticket, one in zip(goes_on, expected, strict=True):
            assert_same(given(ticket.events()), one)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("backend", ["native", "auto"])
def test_a_server_answers_with_the_step(backend, tmp_path, monkeypatch):
    """Several clients at once, on two rows; "auto" takes it because this user built it here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library = compiled(best())
    monkeypatch.setattr("txl_engines.native.compile_step", lambda command, path, *_: shutil.copy(library, path))
    bundle = reseal(copied(frozen("clusters"), tmp_path / "letters.txl"), boundary_token=10)
    build_native(bundle)
    prompts = ["once upon", "a time", "there was", "a b", "c"]
    model = load(bundle, "cpu", threads=1)
    expected = [_greedy(model, prompt) for prompt in prompts]
    with serving(Path(bundle), "--backend", backend, "--threads", 2) as server:
        assert "a step in C" in server.ready["backend"]
        with httpx2.Client(base_url=server.url, timeout=60) as client:
            body = {"max_tokens": 8, "temperature": 0, "logprobs": 0, "return_token_ids": True, "prompt": prompts}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            found = [choice["logprobs"]["token_ids"] for choice in answer.json()["choices"]]
            named = client.post("/v1/completions", json={**body, "prompt": "once", "session": "ada"})
            state = client.get("/v1/sessions/ada/state")
            assert (named.status_code, state.status_code) == (200, 200)
        assert server.end() == 0
    assert found == expected


def _greedy(model, prompt: str) -> list[int]:
    tokens = model.vocabulary.encode(prompt.encode())
    return [int(token[0]) for token in model.stream(1).generate(np.asarray(tokens), 8, temperature=0)]
