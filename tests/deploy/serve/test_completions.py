"""POST /v1/completions against `Stream`: the same tokens, the same log-probabilities, in the form that clients know."""

from __future__ import annotations

import asyncio
import codecs
import itertools

import numpy as np
import pytest
import txl_runtime
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

TEXT = "a small text, é and €"


@pytest.fixture(scope="module")
def model(letters):
    """The bundle itself."""
    return txl_runtime.load(letters, "cpu", threads=1)


def ids(text: str | bytes) -> list[int]:
    return list(text.encode() if isinstance(text, str) else text)


def generated(model, prompt, count, **options) -> list[int]:
    return [int(token[0]) for token in model.stream(1).generate(ids(prompt), count, **options)]


def text_of(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def test_text_goes_on_as_a_stream_goes_on(served, model):
    answer = served.complete(prompt=TEXT, max_tokens=20, temperature=0)
    expected = generated(model, TEXT, 20, temperature=0.0)
    assert answer["choices"] == [{"text": text_of(expected), "index": 0, "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {
        "prompt_tokens": len(ids(TEXT)),
        "completion_tokens": 20,
        "total_tokens": 20 + len(ids(TEXT)),
    }
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "small"


def test_a_seed_gives_what_the_command_line_gives(served, model):
    for seed in (0, 7):
        answer = served.complete(prompt=TEXT, max_tokens=12, seed=seed, temperature=0.9, top_k=50, top_p=0.9)
        expected = generated(model, TEXT, 12, temperature=0.9, top_k=50, top_p=0.9, seed=seed)
        assert answer["choices"][0]["text"] == text_of(expected)


def test_biases_as_the_openai_package_sends_them(served, model):
    """Keys are texts of ids. Whole, streamed, several texts, and in a session the tokens are those of a stream."""
    bias = {"97": 100, "98": 99.5, "99": -100, "0": -1}
    asked = {"prompt": "once", "max_tokens": 9, "seed": 2, "logit_bias": bias}
    named = {int(name): value for name, value in bias.items()}
    drawn = list(model.stream(1).generate("once", 9, seed=2, logit_bias=named).texts())
    expected = "".join(text for (text,) in drawn)
    assert set(expected) == {"a", "b"}
    assert served.complete(**asked)["choices"][0]["text"] == expected
    assert "".join(event["choices"][0]["text"] for event in served.stream(**asked)) == expected
    assert served.complete(**asked, session="biased")["choices"][0]["text"] == expected
    served.request("DELETE", "/v1/sessions/biased")  # other tests share this server
    several = served.complete(**asked | {"n": 3, "prompt": ["once", "upon"]})["choices"]
    assert several[0]["text"] == expected
    assert all(set(choice["text"]) <= {"a", "b"} for choice in several)
    for none in ({}, None):
        assert (
            served.complete(**asked | {"logit_bias": none})["choices"]
            == served.complete(prompt="once", max_tokens=9, seed=2)["choices"]
        )


def test_log_probabilities_beside_biases_are_the_models_own(served):
    def scored(**more):
        (choice,) = served.complete(prompt="once", max_tokens=1, temperature=0, logprobs=1, **more)["choices"]
        return choice["logprobs"]

    plain, biased = scored(), scored(logit_bias={"97": 100})
    assert biased["tokens"] == ["a"] != plain["tokens"]
    assert biased["token_logprobs"][0] < plain["token_logprobs"][0]
    (name,) = plain["tokens"]
    assert biased["top_logprobs"][0][name] == plain["token_logprobs"][0], "the best one as before"


def test_the_same_prompt_as_text_ids_and_lists(served):
    forms = [TEXT, ids(TEXT), [TEXT], [ids(TEXT)]]
    answers = [served.complete(prompt=form, max_tokens=8, seed=3)["choices"] for form in forms]
    assert all(answer == answers[0] for answer in answers)


def test_several_prompts_and_texts_have_their_own_numbers(served):
    asked = {"max_tokens": 6, "seed": 5, "temperature": 1.5}
    answer = served.complete(prompt=[TEXT, "b"], n=3, **asked)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert answer["usage"]["prompt_tokens"] == len(ids(TEXT)) + 1
    assert answer["usage"]["completion_tokens"] == 36
    assert len({choice["text"] for choice in answer["choices"][:3]}) == 3, "every text has draws of its own"
    assert answer["choices"][0] == served.complete(prompt=TEXT, **asked)["choices"][0]
    again = served.complete(prompt=[TEXT, "b"], n=3, **asked)
    assert again["choices"] == answer["choices"]


def test_log_probabilities_of_prompt_and_text(served, model):
    answer = served.complete(prompt=TEXT, max_tokens=1, logprobs=3, echo=True, temperature=0)
    choice, prompt = answer["choices"][0], ids(TEXT)
    logprobs = choice["logprobs"]
    assert {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {
        len(prompt) + 1
    }
    stream = model.stream(1)
    rows = stream.feed(np.array([prompt]))[0]
    drawn = int(rows[-1].argmax())
    assert choice["text"] == text_of([*prompt, drawn])
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    own = [float(row[token]) for row, token in zip(rows, [*prompt[1:], drawn], strict=True)]
    np.testing.assert_allclose(logprobs["token_logprobs"][1:], own, atol=1e-5)
    for row, found, value in zip(rows, logprobs["top_logprobs"][1:], logprobs["token_logprobs"][1:], strict=True):
        best = sorted(row.tolist(), reverse=True)[:3]
        assert 3 <= len(found) <= 4
        np.testing.assert_allclose(sorted(found.values(), reverse=True)[:3], best, atol=1e-5)
        assert value in found.values(), "the token's own is among them, to the bit"
    assert "bytes:\\xc3" in logprobs["tokens"]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    ends = list(itertools.accumulate(len(decoder.decode(bytes([token]))) for token in prompt))
    assert logprobs["text_offset"] == [0, *ends], "where the character begins that the token is of"


def test_log_probabilities_come_with_ids(served):
    plain = served.complete(prompt=TEXT, max_tokens=2, logprobs=3, echo=True, seed=1)["choices"][0]
    choice = served.complete(prompt=TEXT, max_tokens=2, logprobs=3, echo=True, seed=1, return_token_ids=True)["choices"]
    found = choice[0]["logprobs"]
    assert {name: found[name] for name in plain["logprobs"]} == plain["logprobs"]
    assert found["token_ids"][:-2] == ids(TEXT)
    assert found["top_token_ids"][0] is None
    names = [{served.service.pieces.name(token) for token in top.values()} for top in found["top_token_ids"][1:]]
    assert names == [set(top) for top in found["top_logprobs"][1:]]
    own = zip(found["tokens"], found["top_token_ids"], found["token_ids"], strict=True)
    assert all(top[name] == token for name, top, token in own if top)
    pieces = served.stream(prompt=TEXT, max_tokens=2, logprobs=3, echo=True, seed=1, return_token_ids=True)
    streamed = [token for piece in pieces for token in piece["choices"][0]["logprobs"]["token_ids"]]
    assert streamed == found["token_ids"]


@pytest.mark.parametrize("logprobs", [0, 1, 20])
def test_how_many_log_probabilities_are_told(served, logprobs):
    answer = served.complete(prompt="ab", max_tokens=3, logprobs=logprobs, seed=1)
    found = answer["choices"][0]["logprobs"]
    assert len(found["token_logprobs"]) == 3
    assert all(logprobs <= len(top) <= logprobs + 1 for top in found["top_logprobs"]) or logprobs == 0
    if logprobs == 0:
        assert found["top_logprobs"] == [{}, {}, {}]


def test_a_prompt_alone_is_measured(served, model):
    answer = served.complete(prompt=[TEXT, "ab"], max_tokens=0, logprobs=0, echo=True)
    for choice, text in zip(answer["choices"], (TEXT, "ab"), strict=True):
        assert choice["text"] == text
        nll = model.stream(1).score([ids(text)])[0]
        np.testing.assert_allclose(choice["logprobs"]["token_logprobs"][1:], -nll, atol=1e-5)
        assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


def test_an_empty_prompt_is_the_boundary_token(served, model):
    expected = text_of(generated(model, b"\n", 9, temperature=0.0))
    for prompt in ("", [], [""], [[]], None):
        answer = served.complete(prompt=prompt, max_tokens=9, temperature=0)
        assert answer["choices"][0]["text"] == expected


def test_a_session_goes_on_with_its_memory(served, model):
    stream, text = model.stream(1), ""
    expected = [int(token[0]) for token in stream.generate(ids("once upon"), 12, temperature=0.0)]
    for prompt, count in (("once upon", 5), ("", 4), ("", 3)):
        text += served.complete(prompt=prompt, session="tale", max_tokens=count, temperature=0)["choices"][0]["text"]
    assert text.encode() == text_of(expected).encode() or "\ufffd" in text
    served.complete(prompt="once upo", session="other", max_tokens=0)
    asked = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    own, alone = (
        served.complete(**asked, **more)["choices"][0]["logprobs"]
        for more in ({"prompt": "x", "session": "other"}, {"prompt": "once upox"})
    )
    assert own["token_logprobs"][0] is None, "what stood before it is fed already"
    np.testing.assert_allclose(own["token_logprobs"][-1], alone["token_logprobs"][-1], atol=1e-5)
    after = served.complete(prompt="yz", session="other", **asked)["choices"][0]["logprobs"]
    assert after["token_logprobs"][0] < 0, "the token drawn last stands before it"
    for name in ("tale", "other"):
        assert served.request("DELETE", f"/v1/sessions/{name}").json()["deleted"]


@pytest.mark.parametrize("count", [5, 30])
def test_a_session_ends_with_the_token_that_ends_a_stop_text(served, model, count):
    """However fast the client is told: the memory is that of the text up to there, and of no token behind it."""
    whole = generated(model, "abc", 60, seed=11)
    stop = text_of(whole[count : count + 2])
    if "\ufffd" in stop:
        stop = text_of([token for token in whole[count:] if token < 128][:1])
    name = f"stop{count}"
    answer = served.complete(prompt="abc", session=name, max_tokens=60, seed=11, stop=stop)
    assert answer["choices"][0]["finish_reason"] == "stop"
    used = answer["usage"]["completion_tokens"]
    info = served.get(f"/v1/sessions/{name}").json()
    assert info["seen"] == 3 + used - 1, "all but the last one are fed"
    assert info["pending"] == whole[used - 1]
    served.request("DELETE", f"/v1/sessions/{name}")


def test_stop_tokens_end_a_text_and_are_no_part_of_it(served, model):
    whole = generated(model, "abc", 40, seed=2)
    stop = whole[10]
    answer = served.complete(prompt="abc", max_tokens=40, seed=2, stop_token_ids=[stop])
    used = whole.index(stop)
    assert answer["choices"][0]["text"] == text_of(whole[:used])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == used + 1


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1000),
    stops=st.lists(st.text(alphabet="abcdefgh eE\ufffd", min_size=1, max_size=2), max_size=4),
    echo=st.booleans(),
    logprobs=st.sampled_from([None, 0, 2]),
)
def test_streamed_is_unstreamed(served, seed, stops, echo, logprobs):
    asked = {"prompt": ["héllo ", "b"], "n": 2, "max_tokens": 12, "seed": seed, "temperature": 0.7, "top_k": 8}
    asked |= {"stop": stops, "echo": echo, "logprobs": logprobs}
    whole = served.complete(**asked)
    events = served.stream(**asked, stream_options={"include_usage": True})
    assert events.pop()["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events)
    for choice in whole["choices"]:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts][-1] == choice["finish_reason"]
        assert not any(part["finish_reason"] for part in parts[:-1])
        assert not any(stop in choice["text"].removeprefix("héllo ") for stop in stops) or echo
        if logprobs is None:
            assert all(part["logprobs"] is None for part in parts)
            continue
        for name, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][name]] == values
        assert all(
            offset < len(choice["text"]) or len(choice["text"]) == 0 for offset in choice["logprobs"]["text_offset"]
        )


def test_a_client_can_say_where_its_session_stands(served):
    """So a request that is sent again by a client's own retries is never fed twice."""
    asked = {"prompt": "abc", "session": "kept", "max_tokens": 2, "temperature": 0}
    first = served.complete(**asked, session_seen=0)
    assert first["session"] == {"name": "kept", "seen": 4}
    for wrong in (0, 3, 5, -1, 1 << 80):
        error = served.refused(409, json={**asked, "session_seen": wrong})
        assert (error["param"], error["code"]) == ("session_seen", "session_elsewhere")
        assert "the session has seen 4 positions" in error["message"]
    events = served.stream(**asked, session_seen=4)
    assert [event["session"] for event in events if "session" in event] == [{"name": "kept", "seen": 9}]
    assert events[-1]["session"]["seen"] == served.get("/v1/sessions/kept").json()["seen"]
    served.request("DELETE", "/v1/sessions/kept")
    assert served.refused(409, json={**asked, "session_seen": 9})["code"] == "session_elsewhere"
    assert served.refused(400, json={"prompt": "a", "session_seen": 0})["param"] == "session_seen"


def test_a_stop_text_may_begin_inside_the_prompt(served, model):
    """If a prompt ends inside a character that the text finishes, both sides read the same character."""
    for seed in range(60):
        (first, *_) = generated(model, b"\xc3", 4, seed=seed)
        if 0x80 <= first < 0xC0:
            break
    asked = {"prompt": [0xC3], "session": "cut", "max_tokens": 4, "seed": seed, "echo": True}
    answer = served.complete(**asked, stop=bytes([0xC3, first]).decode())
    assert answer["choices"][0] == {"text": "", "index": 0, "logprobs": None, "finish_reason": "stop"}
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["session"]["seen"] == 1
    served.request("DELETE", "/v1/sessions/cut")


def test_a_request_of_many_texts_takes_no_more_than_the_rows(serve):
    """So others are served in between, and find room."""
    server = serve(waiting=2)
    most = []

    async def watch():
        asked = {"prompt": ["ab", "cd"], "n": 16, "max_tokens": 200, "seed": 1}
        running = asyncio.create_task(server.client.post("/v1/completions", json=asked))
        while not running.done():
            most.append(await server.service.front.call(lambda sessions: sessions.unfinished))
            await asyncio.sleep(0.005)
        return await running

    answer = server.wait(watch())
    assert answer.status_code == 200
    assert max(most) == 2
    texts = [choice["text"] for choice in answer.json()["choices"]]
    assert len(texts) == 32
    alone = server.complete(prompt=["ab", "cd"], n=16, max_tokens=200, seed=1)
    assert [choice["text"] for choice in alone["choices"]] == texts


def test_texts_that_were_taken_in_before_a_refusal_are_taken_back(serve):
    server = serve(waiting=0)

    async def ask():
        def unfinished():
            return server.service.front.call(lambda sessions: sessions.unfinished)

        asked = {"prompt": "ab", "max_tokens": 16000}
        first = asyncio.create_task(server.client.post("/v1/completions", json={**asked, "session": "long"}))
        while await unfinished() != 1:
            await asyncio.sleep(0.005)
        refused = await server.client.post("/v1/completions", json={**asked, "n": 3})
        left = await unfinished()
        await server.client.delete("/v1/sessions/long")
        return refused, left, await first

    refused, left, first = server.wait(ask())
    assert refused.status_code == 429
    assert left == 1
    assert first.status_code == 503


def test_a_limit_on_memory_rows(served, model):
    """The log-probabilities are those of a stream with that limit, and what was cut off is gone."""
    whole = ids(TEXT)
    asked = {"prompt": TEXT, "max_tokens": 0, "logprobs": 0, "echo": True, "session": "short"}
    for rows in (0, 3, None):
        found = served.complete(**asked, memory_length=rows)["choices"][0]["logprobs"]["token_logprobs"][1:]
        nll = model.stream(1, memory_length=rows).score([whole])[0]
        np.testing.assert_allclose(found, -nll, rtol=0, atol=1e-4)
        most = 6 if rows is None else rows
        assert served.get("/v1/sessions/short").json()["fill"] == min(most, len(whole))
        served.request("DELETE", "/v1/sessions/short")
    served.complete(prompt=TEXT, max_tokens=0, session="short")
    served.complete(prompt="ab", max_tokens=1, session="short", memory_length=1)
    assert served.get("/v1/sessions/short").json()["fill"] == 1
    served.request("DELETE", "/v1/sessions/short")


@pytest.mark.parametrize("wrong", [-1, 7, 2**70, 1.5, "3", True])
def test_a_limit_on_memory_rows_that_is_none(served, wrong):
    error = served.refused(400, json={"prompt": "a", "memory_length": wrong})
    assert error["param"] == "memory_length"
    assert "memory_length" in error["message"]
