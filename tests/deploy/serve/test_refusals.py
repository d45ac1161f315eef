"""Refusals: a status, one object that clients can read, and a message that says what to do."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest
from frozen import frozen
from safetensors.numpy import load, save
from starlette.datastructures import Headers
from step_models import counting
from support import until

from txl_deploy.serve import bodies
from txl_deploy.serve.bodies import BODY_BYTES
from txl_deploy.serve.errors import ApiError
from txl_deploy.serve.orders import read_order
from txl_deploy.serve.settings import PROMPT_TOKENS

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"temperature": -1}, "temperature", "temperature is -1"),
        ({"top_p": 0}, "top_p", "top_p is 0"),
        ({"top_k": -3}, "top_k", "top_k is -3"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens is -1, expected 0 … 16384"),
        ({"max_tokens": 1 << 60}, "max_tokens", "expected 0 … 16384"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0 without echo or session"),
        ({"max_tokens": "5"}, "max_tokens", "Expected `int | null`, got `str`"),
        ({"n": 0}, "n", "n is 0, expected 1 … 128"),
        ({"n": 65, "prompt": ["a", "b"]}, "n", "2 prompts times n 65 exceed 128 texts"),
        ({"logprobs": 21}, "logprobs", "logprobs is 21, expected 0 … 20"),
        ({"logprobs": 20, "max_tokens": 16384, "n": 128}, "logprobs", "log-probabilities in one answer"),
        ({"logit_bias": {"256": 1}}, "logit_bias", "logit_bias is [256], expected a list of ids, 0 … 255 each"),
        (
            {"logit_bias": {"5": -100.5}},
            "logit_bias",
            "logit_bias is -100.5 for token 5, expected a number, -100 … 100",
        ),
        *(
            ({"logit_bias": {name: 1}}, "logit_bias", f"logit_bias is for {name!r}, expected token ids such as '17'")
            for name in ("a", "", "-1", "+1", "01", "1_0", " 1", "1.0", "٣")
        ),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "expected token ids such as '17'"),
        ({"logit_bias": {"5": "1"}}, "logit_bias", "Expected `float`, got `str`"),
        ({"logit_bias": [5]}, "logit_bias", "got `array`"),
        (
            {"logit_bias": dict.fromkeys(map(str, range(1025)), 0)},
            "logit_bias",
            "has 1025 tokens, expected at most 1024",
        ),
        ({"logit_bias": {"5": 101}, "stream": True}, "logit_bias", "logit_bias is 101.0 for token 5"),
        ({"best_of": 2}, "best_of", "best_of is 2"),
        ({"stop": ["a"] * 5}, "stop", "5 stop texts are given, expected at most 4"),
        ({"stop": "a" * 257}, "stop", "more than 256 characters"),
        ({"max_token": 5}, "max_token", "has the field 'max_token', expected the API's; did you mean 'max_tokens'?"),
        ({"temprature": 0}, "temprature", "did you mean 'temperature'?"),
        ({"colour": 0}, "colour", "the request has the field 'colour', expected the API's; take it out"),
        ({"prompt": ["a", 1]}, "prompt", "the prompt mixes texts, ids and lists"),
        ({"prompt": [256]}, "prompt", "expected 0 … 255"),
        ({"prompt": [-1]}, "prompt", "expected 0 … 255"),
        ({"prompt": [1 << 40]}, "prompt", "beyond any vocabulary"),
        ({"prompt": {"a": 1}}, "prompt", "got `object`"),
        ({"prompt": ["a"] * 129}, "prompt", "129 prompts"),
        ({"session": "a", "n": 2}, "session", "a session continues one text, this asks for 2"),
        ({"session": "a/b"}, "session", "session is 'a/b'"),
        ({"session": "x" * 257}, "session", "expected 1 … 256 characters"),
        ({"stop_token_ids": [256]}, "stop_token_ids", "256"),
        ({"stream_options": {"include": True}}, "include", "unknown field `include`"),
    ],
)
def test_fields_that_are_wrong(served, body, param, message):
    error = served.refused(400, json={"prompt": "ab", **body})
    assert message in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 700


CHANGING = {
    "suffix": ("", "x"),
    "presence_penalty": (0, 0.5),
    "frequency_penalty": (0.0, -0.5),
    "repetition_penalty": (1.0, 1.5),
    "length_penalty": (1, 2),
    "min_p": (0, 0.1),
    "min_tokens": (0, 2),
    "use_beam_search": (False, True),
}
"""Fields that are not offered: a value that changes nothing, and one that would."""


@pytest.mark.parametrize("name", CHANGING)
def test_fields_that_would_change_the_result_are_taken_where_they_do_not(served, name):
    neutral, other = CHANGING[name]
    assert served.complete(prompt="ab", max_tokens=1, **{name: neutral})["usage"]["completion_tokens"] == 1
    error = served.refused(400, json={"prompt": "ab", name: other})
    assert f"{name} would change the result and is not offered" in error["message"]
    assert error["param"] == name


@pytest.mark.parametrize(
    "body",
    [
        {"user": "me", "metadata": {"a": [1]}, "store": True, "service_tier": "auto"},
        {"n": None, "stop": None, "seed": None, "temperature": None, "logprobs": None, "stream": None, "top_p": 1},
        {"top_k": -1, "repetition_penalty": 1.0, "ignore_eos": True, "model": ""},
        {"seed": -5},
        {"seed": 1 << 70},
        {"n": 2, "best_of": 2},
    ],
)
def test_fields_that_are_harmless(served, body):
    assert served.complete(prompt="ab", max_tokens=1, **body)["usage"]["completion_tokens"] == (body.get("n") or 1)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b'"a"', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"[" * 4000, b'{"n":' * 4000],
)
def test_bodies_that_are_no_request(served, data):
    error = served.refused(400, content=data, headers=JSON)
    assert "the body is" in error["message"]


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"max_tokens": 0}])
def test_how_much_one_answer_echoes(served, more):
    """It is echoed before anything is computed, while nobody else is answered."""

    def read(prompt, **body):
        data = json.dumps({"prompt": prompt, **more, **body}).encode()
        return read_order(data, Headers(), served.model, served.settings)

    assert read("a" * 4096, n=128, echo=True).many == 128
    assert read(["a" * 4095, "a" * 4097], n=64, echo=True).many == 64
    if more.get("max_tokens") != 0:
        assert not read("a" * 4097, n=128).echo, "nothing is echoed"
    for prompt, many, found in (("a" * 4097, 128, 524416), (["a" * 4096, "a" * 4097], 64, 524352)):
        with pytest.raises(ApiError, match=f"{found} tokens of prompts to echo exceed 524288 in one answer") as caught:
            read(prompt, n=many, echo=True)
        assert (caught.value.status, caught.value.param) == (400, "echo")


def test_another_model_is_not_here(served):
    error = served.refused(404, json={"model": "gpt", "prompt": "a"})
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "expected 'small'" in error["message"]
    for name in ("small", served.model.manifest.model_id):
        assert served.complete(model=name, prompt="a", max_tokens=1)["model"] == "small"


def test_bodies_have_to_say_that_they_are_json(served):
    for headers in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
        error = served.refused(415, content=b'{"prompt": "a"}', headers=headers)
        assert "send the header Content-Type: application/json" in error["message"]
    content = {"content-type": "application/json; charset=utf-8"}
    assert served.request("POST", "/v1/completions", content=b'{"prompt": "a"}', headers=content).status_code == 200


def test_large_bodies_are_refused(served):
    error = served.refused(413, json={"prompt": "a" * BODY_BYTES})
    assert error["message"] == "the body has more than 1048576 bytes, expected at most those; send it in parts"

    async def parts():
        for _ in range(20):
            yield b" " * (BODY_BYTES // 10)

    assert "more than 1048576" in served.refused(413, content=parts(), headers=JSON)["message"]
    error = served.refused(400, json={"prompt": "a" * (PROMPT_TOKENS + 1)})
    assert "the prompt has 262145 tokens, expected at most 262144; send it in parts" in error["message"]
    assert error["param"] == "prompt"


def test_a_body_that_does_not_come_is_not_waited_for(served, monkeypatch):
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.05)

    async def parts():
        yield b'{"prompt"'
        await asyncio.Event().wait()

    error = served.refused(408, content=parts(), headers=JSON)
    assert (error["type"], error["message"][:35]) == ("timeout_error", "the body took more than 0.05 s, exp")


def test_paths_and_methods_that_are_none(served):
    error = served.refused(404, "GET", "/v1/embeddings")
    assert (error["code"], error["message"].endswith("open / to see which there are")) == ("path", True)
    assert served.refused(404, "GET", "/v1/models/gpt")["code"] == "model_not_found"
    assert served.refused(404, "GET", "/v1/sessions/")["code"] == "path"
    error = served.refused(405, "GET", "/v1/completions")
    assert "this path takes POST" in error["message"]
    assert served.refused(405, "OPTIONS", "/v1/completions")["code"] == "method"


def test_whoever_wants_to_chat_is_told_what_there_is(served):
    """As the clients of OpenAI read it, whatever the body holds."""
    body = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}
    for options in ({"json": body}, {"content": b"no JSON"}):
        error = served.refused(404, path="/v1/chat/completions", **options)
        assert (error["type"], error["code"]) == ("invalid_request_error", "no_chat_template")
        assert "has no chat template" in error["message"]
        assert "use POST /v1/completions" in error["message"]


def test_a_body_whose_end_two_headers_tell_is_the_connections_last(served):
    both = {"content-length": "0", "transfer-encoding": "chunked"}
    assert served.get("/v1/models", headers=both).headers["connection"] == "close"
    assert "connection" not in served.get("/v1/models", headers={"content-length": "0"}).headers


@pytest.mark.parametrize("host", ["example.com", "localhost.example.com", "", "127.0.0.2", "evil:8000", "[::2]:80"])
def test_only_names_of_this_machine_are_answered_on_loopback(served, host):
    """A page in a browser can have its own name lead here; then the Host header is that name."""
    assert served.refused(400, "GET", "/v1/models", headers={"host": host})["code"] == "host"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "LOCALHOST:1", "[::1]:8000", "[::1]"])
def test_names_of_this_machine(served, host):
    assert served.get("/v1/models", headers={"host": host}).status_code == 200


def test_a_token_is_asked_for_everywhere_but_for_health(serve):
    server = serve(token="secret-token")
    shown = ("", "Bearer wrong", "secret-token", "Basic x", "Bearer wrong")
    for path, said in zip(("/v1/models", "/v1/models", "/metrics", "/v1/sessions", "/nowhere"), shown, strict=True):
        answer = server.get(path, headers={"authorization": said})
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert server.get("/health").status_code == 200
    assert server.get("/v1/models", headers={"authorization": "bearer secret-token"}).status_code == 200


def test_a_model_without_boundary_token_asks_for_a_prompt(serve):
    server = serve(frozen("0.8/clusters"))
    error = server.refused(400, json={"prompt": ""})
    assert "no boundary token" in error["message"]
    assert "export with --boundary-token ID" in error["message"]
    error = server.refused(400, json={"prompt": "a"})
    assert "no vocabulary to read a text with, expected token ids" in error["message"]
    assert server.complete(prompt=[1, 2], max_tokens=3)["usage"]["completion_tokens"] == 3


def test_too_many_sessions_are_told_to_come_later(serve):
    server = serve(sessions=2)
    for name in "ab":
        server.complete(prompt="x", session=name, max_tokens=1)
    answer = server.post("/v1/completions", {"prompt": "x", "session": "c", "max_tokens": 1})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert answer.json()["error"]["code"] == "busy"
    server.request("DELETE", "/v1/sessions/a")
    server.complete(prompt="x", session="c", max_tokens=1)


def test_a_session_that_fails_is_told_why_and_its_neighbours_are_well(serve):
    server = serve()
    expected = server.complete(prompt="x", max_tokens=5, temperature=0)["choices"]
    server.complete(prompt="abc", session="a", max_tokens=1)
    tensors = load(server.get("/v1/sessions/a/state").content)
    facts = {"format": "txl-deploy.state/1", "model_id": server.model.manifest.model_id}
    poisoned = {
        name: np.full_like(each, np.nan) if each.dtype == np.float32 else each for name, each in tensors.items()
    }
    for more in ({}, {"stream": True}):
        assert server.request("PUT", "/v1/sessions/a/state", content=save(poisoned, facts)).status_code == 200
        answer = server.post("/v1/completions", {"prompt": "b", "session": "a", **more})
        assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false"), "some of it may be fed"
        error = answer.json()["error"]
        assert "NaN" in error["message"]
        assert error["type"] == "server_error"
        assert server.complete(prompt="x", max_tokens=5, temperature=0)["choices"] == expected
        assert server.refused(404, "GET", "/v1/sessions/a"), "it has ended with its memory"
    counted = server.get("/metrics").text
    assert "\ntxl_sessions_broken_total 2.0\n" in counted
    assert "\ntxl_sessions_lost_total 2.0\n" in counted


def test_a_defect_is_told_by_its_place_and_quotes_nothing(serve, monkeypatch, capfd):
    server = serve(json_logs=True)

    def broken(request):
        raise KeyError("something private")

    monkeypatch.setattr(server.model.manifest.__class__, "boundary_token", property(broken), raising=False)
    error = server.refused(500, "GET", "/tokenizer_info")
    assert error["code"] == "defect"
    assert "KeyError at test_refusals.py" in error["message"]
    log = capfd.readouterr().err
    assert "private" not in error["message"] + log
    first, second = (json.loads(line) for line in log.splitlines())
    assert (first["event"], second["event"], second["status"]) == ("defect", "request", 500)
    assert first["id"] == second["id"]


def test_a_stopping_server_takes_no_more(serve):
    server = serve()
    server.service.draining = True
    answer = server.post("/v1/completions", {"prompt": "x"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "5"
    assert server.get("/health").status_code == 503
    assert server.get("/health").json() == {"status": "draining"}
    assert server.refused(503, "GET", "/")["code"] == "draining", "who looks there for it sends no more either"


def test_what_is_asked_of_sessions_that_have_failed_is_no_mistake_of_its_client(serve):
    server = serve()
    begun, go_on = threading.Event(), threading.Event()

    def broken():
        begun.set()
        go_on.wait()
        raise RuntimeError("nobody foresaw it")

    server.wait(server.service.front.call(lambda sessions: setattr(sessions, "round", broken)))
    begun.wait()
    asked = asyncio.run_coroutine_threadsafe(server.client.get("/v1/sessions"), server.loop)
    until(lambda: server.service.front._calls)
    go_on.set()
    answers = [asked.result()]
    server.wait(server.service.front.ended())
    for more in ({}, {"stream": True}, {"session": "a"}):
        answers.append(server.post("/v1/completions", {"prompt": "x", **more}))
    for answer, message in zip(answers, ["the sessions were closed", *["the sessions are closed"] * 3], strict=True):
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (503, "server_error", "closed")
        assert message in error["message"]


def test_what_is_refused_when_an_answer_has_begun_is_its_last_event(serve, tmp_path):
    model = counting((4,))
    model.lengths = "exact"
    server = serve(model.write(tmp_path / "exact.txl"), rows=1)
    asked = {"max_tokens": 0, "echo": True, "logprobs": 0}
    whole = server.refused(400, json={"prompt": [[1] * 4, [1] * 3], **asked})
    assert "expected what segments of 4 add up to" in whole["message"]
    answer = server.post("/v1/completions", {"prompt": [[1] * 4, [1] * 3], **asked, "stream": True})
    assert answer.status_code == 200
    first, *_, last = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    assert first["choices"][0]["index"] == 0
    assert last == {"error": whole}
    at_once = server.refused(400, json={"prompt": [[1] * 3, [1] * 4], **asked, "stream": True})
    assert at_once == whole, "nothing was sent before it"
