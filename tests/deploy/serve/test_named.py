"""Sessions over HTTP: what they are, their states out and in, and arrays for models that read no text."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import txl_runtime
from safetensors.numpy import load, save
from step_models import FEATURES, recurrent
from txl_runtime.streaming.snapshot import StreamState

from txl_deploy.serve.bodies import BODY_BYTES

STEP = Path(__file__).parents[3] / "conformance" / "bad_bundles" / "bases" / "step"
STATE = {"content-type": "application/octet-stream"}
SAFETENSORS = {"content-type": "application/vnd.safetensors"}


@pytest.fixture
def robot(serve):
    """A server of a model that reads features."""
    return serve(STEP)


def test_a_session_is_there_until_it_is_deleted(served):
    assert served.refused(404, "GET", "/v1/sessions/ada")["code"] == "session_not_found"
    served.complete(prompt="abc", session="ada", max_tokens=2, temperature=0)
    found = served.get("/v1/sessions/ada").json()
    assert (found["object"], found["name"], found["seen"], found["running"]) == ("session", "ada", 4, False)
    assert found["place"] in ("row", "host")
    assert [each["name"] for each in served.get("/v1/sessions").json()["data"]] == ["ada"]
    assert served.request("DELETE", "/v1/sessions/ada").json() == {"object": "session", "name": "ada", "deleted": True}
    assert served.get("/v1/sessions").json()["data"] == []
    assert served.refused(404, "DELETE", "/v1/sessions/ada")["code"] == "session_not_found"
    assert served.refused(404, "GET", "/v1/sessions/ada/state")["code"] == "session_not_found"


def test_a_request_is_cancelled_and_its_session_goes_on(served):
    path, body = "/v1/sessions/ada/cancel", {"session": "ada", "seed": 1, "logprobs": 0, "return_token_ids": True}
    assert served.refused(404, path=path)["code"] == "session_not_found"
    long = {**body, "prompt": "abc", "max_tokens": 16_000, "stream": True}
    asked = asyncio.run_coroutine_threadsafe(served.client.post("/v1/completions", json=long), served.loop)
    while not any(each["seen"] > 20 for each in served.get("/v1/sessions").json()["data"]):
        pass
    assert served.request("POST", path).json() == {"object": "session", "name": "ada", "cancelled": 1}
    *pieces, last = [json.loads(line[6:]) for line in asked.result(60).text.split("\n\n") if line.startswith("data: {")]
    assert last["error"]["code"] == "cancelled"
    drawn = [token for piece in pieces for token in piece["choices"][0]["logprobs"]["token_ids"]]
    found = served.get("/v1/sessions/ada").json()
    assert (found["running"], found["seen"], found["pending"]) == (False, 3 + len(drawn) - 1, drawn[-1])
    whole = served.complete(**{**body, "session": "bea", "prompt": "abc", "max_tokens": len(drawn)})
    assert whole["choices"][0]["logprobs"]["token_ids"] == drawn, "everything that was drawn was told"
    assert served.request("POST", path).json()["cancelled"] == 0
    for name in ("ada", "bea"):
        served.request("DELETE", f"/v1/sessions/{name}")


@pytest.mark.parametrize("name", ["a b", "é", "100%25", "a?b", "…", "x" * 256, "-"])
def test_names_are_any_text_that_fits_an_address(served, name):
    served.complete(prompt="abc", session=name, max_tokens=1)
    (found,) = served.get("/v1/sessions").json()["data"]
    assert found["name"] == name
    path = f"/v1/sessions/{quote(name, safe='')}"
    assert served.get(path).json()["name"] == name
    assert served.request("DELETE", path).json()["name"] == name


def test_a_state_moves_to_another_session_and_to_a_stream(served, tmp_path):
    served.complete(prompt="once upon a time", session="here", max_tokens=3, temperature=0)
    answer = served.get("/v1/sessions/here/state")
    assert answer.headers["content-type"] == "application/octet-stream"
    there = served.request("PUT", "/v1/sessions/there/state", content=answer.content, headers=STATE)
    assert there.json() == {"object": "session", "name": "there", "seen": 18}
    both = [
        served.complete(prompt="", session=name, max_tokens=6, temperature=0)["choices"] for name in ("here", "there")
    ]
    assert both[0] == both[1]
    (tmp_path / "state").write_bytes(answer.content)
    stream = txl_runtime.load(served.settings.bundle, "cpu", threads=1).stream(1)
    stream.restore(StreamState.load(tmp_path / "state"))
    assert stream.fill.tolist() == [6]
    for name in ("here", "there"):
        served.request("DELETE", f"/v1/sessions/{name}")


def test_a_session_is_copied_and_stays_as_it_is(served):
    served.complete(prompt="once upon a time", session="here", max_tokens=3, temperature=0)
    before = served.get("/v1/sessions/here").json()
    assert (before["seen"], before["fill"]) == (18, 6)
    copied = served.post("/v1/sessions/here/copy", {"to": "kept"})
    assert copied.json() == {"object": "session", "name": "kept", "seen": 18}
    kept = served.get("/v1/sessions/kept").json()
    assert [kept[name] for name in ("seen", "fill", "pending")] == [
        before[name] for name in ("seen", "fill", "pending")
    ]
    again = {"prompt": "", "session": "here", "max_tokens": 6, "seed": 1}
    first = served.complete(**again)["choices"]
    assert served.post("/v1/sessions/kept/copy", {"to": "here"}).json()["seen"] == 18, "back to where it was kept"
    assert served.complete(**again)["choices"] == first
    assert served.get("/v1/sessions/kept").json()["seen"] == 18
    assert served.post("/v1/sessions/kept/copy", {"to": "kept"}).json()["seen"] == 18
    for name in ("here", "kept"):
        served.request("DELETE", f"/v1/sessions/{name}")


def test_a_copy_that_cannot_be_made_is_refused(served, serve):
    assert served.refused(404, path="/v1/sessions/none/copy", json={"to": "a"})["code"] == "session_not_found"
    served.complete(prompt="abc", session="a", max_tokens=1)
    for to in ("", "x/y", "x" * 257, "\n", ".."):
        assert "session is" in served.refused(400, path="/v1/sessions/a/copy", json={"to": to})["message"]
    for body in ({}, {"to": 1}, {"to": "b", "from": "c"}, []):
        served.refused(400, path="/v1/sessions/a/copy", json=body)
    assert [each["name"] for each in served.get("/v1/sessions").json()["data"]] == ["a"]
    served.request("DELETE", "/v1/sessions/a")
    server = serve(sessions=2)
    for name in ("a", "b"):
        server.complete(prompt="abc", session=name, max_tokens=1)
    assert server.refused(429, path="/v1/sessions/a/copy", json={"to": "c"})["code"] == "busy"
    assert server.post("/v1/sessions/a/copy", {"to": "b"}).status_code == 200


def test_states_of_others_and_damaged_ones_are_refused(served, robot):
    served.complete(prompt="abc", session="a", max_tokens=1)
    state = served.get("/v1/sessions/a/state").content
    served.request("DELETE", "/v1/sessions/a")
    for data, says in [
        (b"", "0 bytes"),
        (state[:-4], "its tensors end at"),
        (save({"x": np.zeros(2, np.float32)}), "another kind of file"),
    ]:
        error = served.refused(400, "PUT", "/v1/sessions/b/state", content=data, headers=STATE)
        assert says in error["message"]
    assert "model" in robot.refused(400, "PUT", "/v1/sessions/b/state", content=state, headers=STATE)["message"]
    most = max(BODY_BYTES, served.service.largest_state)
    error = served.refused(413, "PUT", "/v1/sessions/b/state", content=bytes(most + (1 << 17)), headers=STATE)
    assert "bytes, expected at most" in error["message"]
    assert served.get("/v1/sessions").json()["data"] == []


def test_a_state_is_not_put_under_a_running_request(serve):
    server = serve()
    server.complete(prompt="abc", session="a", max_tokens=1)
    state = server.get("/v1/sessions/a/state").content

    async def put():
        client = server.client
        body = {"prompt": "abc", "session": "a", "max_tokens": 16000}
        running = asyncio.create_task(client.post("/v1/completions", json=body))
        while not (await client.get("/v1/sessions/a")).json()["running"]:
            await asyncio.sleep(0.01)
        refused = await client.put("/v1/sessions/a/state", content=state, headers=STATE)
        copied = await client.post("/v1/sessions/a/copy", json={"to": "b"})
        assert copied.status_code == 200, "as it is after its last round"
        back = await client.post("/v1/sessions/b/copy", json={"to": "a"})
        assert (back.status_code, back.json()["error"]["code"]) == (409, "session_busy")
        deleted = await client.delete("/v1/sessions/a")
        return refused, deleted, await running

    refused, deleted, ended = server.wait(put())
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "session_busy"
    assert deleted.json()["deleted"]
    assert ended.status_code == 503
    assert ended.json()["error"]["code"] == "closed"


def test_features_in_and_out(serve, tmp_path):
    robot = serve(recurrent().write(tmp_path / "robot.txl"))
    model = robot.model
    values = np.random.default_rng(1).normal(size=(1, 9, FEATURES)).astype(np.float32)
    starts = np.zeros(1, np.bool_)
    expected = model.stream(1).feed({"obs": values, "starts": starts})
    given = {"obs": values[:, :5].tolist(), "starts": [False]}
    first = robot.post("/v1/sessions/arm/run", {"inputs": given}).json()
    assert first["positions"] == 5
    body = save({"obs": values[:, 5:], "starts": starts})
    answer = robot.request("POST", "/v1/sessions/arm/run", content=body, headers=SAFETENSORS)
    assert answer.headers["content-type"] == "application/vnd.safetensors"
    second = load(answer.content)
    for output in model.manifest.outputs:
        found = second[output.name]
        assert found.dtype == output.dtype
        if "L" in output.shape:
            found = np.concatenate([np.array(first["outputs"][output.name]), found], output.shape.index("L"))
        np.testing.assert_allclose(found, expected[output.name], atol=1e-5)
    assert robot.get("/v1/sessions/arm").json()["seen"] == 9


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "inputs lack"),
        ({"features": [[1, 2], [3]]}, "features is no array of float32 ['B', 3] (setting an array element"),
        ({"features": "a"}, "Expected `array`, got `str`"),
        ({"features": [["a"]]}, "Expected `float`, got `str`"),
        ({"features": [[[1.0]]]}, "Expected `float`, got `array`"),
        ({"features": [1.0]}, "Expected `array`, got `float`"),
        ({"features": []}, "has shape [0], expected"),
        ({"features": [[]]}, "has shape [1, 0], expected"),
        ({"features": [[None, 1, 2]]}, "Expected `float`, got `null`"),
        ({"features": [[0.0] * 3], "more": [1]}, "inputs hold 'more', expected features; take it out"),
        ({"feature": [[0.0] * 3]}, "inputs hold 'feature', expected features; did you mean 'features'?"),
    ],
)
def test_arrays_that_are_none(robot, inputs, message):
    error = robot.refused(400, path="/v1/sessions/a/run", json={"inputs": inputs})
    assert message in error["message"]
    assert robot.get("/v1/sessions").json()["data"] == []


def test_texts_in_place_of_numbers_take_no_room(served, robot):
    """NumPy would give each of them the room of the longest."""
    tracemalloc.start()
    for server, name in ((served, "tokens"), (robot, "features")):
        inputs = {"inputs": {name: ["x" * 500, *[""] * 200_000]}}
        server.refused(400, path="/v1/sessions/a/run", json=inputs)
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()


def test_ids_beyond_int32_are_refused(served):
    for value in (1 << 40, 1 << 70, -1, 256, 0.5, True):
        served.refused(400, path="/v1/sessions/a/run", json={"inputs": {"tokens": [[value]]}})


def test_a_model_of_features_continues_no_text(robot):
    error = robot.refused(400, json={"prompt": [1]})
    assert "this model does not continue texts" in error["message"]
    assert "POST /v1/sessions/NAME/run" in error["message"]
    assert "no vocabulary" in robot.refused(400, path="/tokenize", json={"prompt": "a"})["message"]
    assert robot.get("/tokenizer_info").json()["eos_token"] is None


def test_tokens_can_be_run_too(served):
    found = served.post("/v1/sessions/t/run", {"inputs": {"tokens": [[97, 98]]}}).json()
    assert np.shape(found["outputs"]["logprobs"]) == (1, 2, 256)
    served.request("DELETE", "/v1/sessions/t")


def test_answers_have_a_size(served):
    """For a model of many words, few positions are much."""
    error = served.refused(400, path="/v1/sessions/t/run", json={"inputs": {"tokens": [[1] * ((1 << 13) + 1)]}})
    assert (
        "8193 positions with 256 values each exceed 2097152 values in one answer; send at most 8192" in error["message"]
    )
    assert served.refused(404, "GET", "/v1/sessions/t")
