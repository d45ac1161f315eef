"""The served model: text to ids and back, health and metrics."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import Served
from txl_runtime.errors import CheckError
from txl_runtime.sessions import Request, Sessions
from txl_runtime.sessions.checkpoint import Checkpoint
from txl_runtime.sessions.requests import Counters

from txl_deploy.serve import health
from txl_deploy.serve.keeping import Keeping
from txl_deploy.serve.logs import Log
from txl_deploy.serve.metrics import COUNTED


def test_the_model_is_listed_with_its_shapes(served):
    (model,) = served.get("/v1/models").json()["data"]
    assert model == served.get("/v1/models/small").json()
    assert (model["id"], model["object"], model["reads_text"], model["batch_size"]) == ("small", "model", True, 2)
    assert model["model_id"] == served.model.manifest.model_id
    assert [entry["name"] for entry in model["inputs"]] == ["tokens"]
    assert (model["segment_lengths"], model["memory_length"]) == ([4, 1], 6)
    assert (model["vocab_size"], model["context"]) == (256, served.model.manifest.reach)
    assert model["limits"] == {
        "prompt_tokens": 1 << 18,
        "max_tokens": 1 << 14,
        "body_bytes": 1 << 20,
        "logprobs": 20,
        "answer_logprobs": 1 << 19,
        "neighbours_tokens": 0,
    }
    assert served.request("HEAD", "/v1/models").status_code == 200


@pytest.mark.parametrize("text", ["", "abc", "é€😀", "a\nb\n", "\0"])
def test_text_to_ids_and_back(served, text):
    found = served.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    assert found["tokens"] == list(text.encode())
    assert found["count"] == len(found["tokens"])
    assert served.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    for tokens in ([256], [-1], [1 << 70]):
        assert served.refused(400, path="/detokenize", json={"tokens": tokens})["param"] == "tokens"


def test_tokens_by_name(served):
    found = served.post("/tokenize", {"prompt": "aé", "return_token_strs": True}).json()
    assert found["token_strs"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]


def test_the_boundary_token_begins_and_ends_texts(served, serve):
    info = served.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["boundary_token_id"]) == ("\n", "\n", 10)
    assert info["vocab_size"] == 256


def test_health_replays_the_self_test_once_a_minute(serve, monkeypatch):
    runs, real = [], health.run_selftest
    monkeypatch.setattr(health, "run_selftest", lambda model: runs.append(1) or real(model))
    server = serve()
    for _ in range(3):
        answer = server.get("/health").json()
        assert answer["status"] == "ok"
        assert answer["self_test"]["steps"] > 0
    assert len(runs) == 1
    monkeypatch.setattr(health, "EVERY", 0.0)
    server.get("/health")
    assert len(runs) == 2


def test_health_tells_what_is_wrong(serve, monkeypatch):
    def wrong(model):
        raise CheckError("log-probabilities differ by 1.0")

    monkeypatch.setattr(health, "run_selftest", wrong)
    answer = serve().get("/health")
    assert answer.status_code == 503
    assert answer.json() == {"status": "failing", "problem": "log-probabilities differ by 1.0"}


def metrics(server) -> dict[str, float]:
    """Samples by name and labels."""
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
    }


def test_metrics_count_requests_tokens_and_sessions(serve):
    server = serve()
    server.complete(prompt="abc", session="a", max_tokens=5)
    server.stream(prompt="abc", max_tokens=2)
    server.refused(400, json={"prompt": "a", "n": 0})
    server.get("/x/y/z")
    found = metrics(server)
    assert found["txl_requests_total /v1/completions 200"] == 2
    assert found["txl_requests_total /v1/completions 400"] == 1
    assert found["txl_requests_total other 404"] == 1, "a path of the client's own is no label"
    assert found["txl_prompt_tokens_total"] == 6
    assert found["txl_completion_tokens_total"] == 7
    assert found["txl_request_seconds_count /v1/completions"] == 3
    assert found["txl_first_token_seconds_count"] == 2
    assert found["txl_sessions_held row"] + found["txl_sessions_held host"] == 1
    assert found["txl_sessions_finished_total length"] == 2
    assert found["txl_sessions_tokens_total"] == 7
    assert found["txl_requests_running"] == 1


def test_every_metric_says_what_it_is_in_a_sentence_of_its_own(served):
    helps = {}
    for line in served.get("/metrics").text.splitlines():
        if line.startswith("# HELP txl_"):
            name, _, said = line.removeprefix("# HELP ").partition(" ")
            assert len(said.split()) >= 5, line
            assert (said[0].isupper(), said[-1]) == (True, "."), line
            helps[name] = said
    assert len(set(helps.values())) == len(helps) > 20
    counted = {entry.name for entry in fields(Counters) if entry.name != "finished"}
    assert set(COUNTED) == counted, "each counter of the sessions is a metric, with its sentence"


def test_the_reference_lists_every_metric(served):
    page = (Path(__file__).parents[3] / "docs" / "serving-reference.md").read_text()
    listed = set(re.findall(r"`(txl_\w+)`", page.partition("### Metrics")[2].partition("\n## ")[0]))
    found = set(re.findall(r"^# TYPE (txl_\w+)", served.get("/metrics").text, re.MULTILINE))
    assert listed == found | {"txl_checkpoints_total", "txl_checkpoint_age_seconds"}, "these two only with a folder"


def test_metrics_tell_what_waits_and_what_sessions_take(serve):
    server = serve(rows=1)
    for name in ("a", "b", "c"):
        server.complete(prompt="abc", session=name, max_tokens=1)
    found = metrics(server)
    assert found["txl_sessions_held row"] == 1
    assert found["txl_sessions_held host"] == 2
    assert found["txl_sessions_bytes host"] == server.sessions.host_bytes > 0
    assert found["txl_requests_waiting"] == 0
    asked = Request([1] * 3, max_new_tokens=100, seconds=60)

    def look(sessions: Sessions) -> int:
        tickets = [sessions.submit(asked, "a"), sessions.submit(asked, "a"), sessions.submit(asked)]
        sessions.round()
        waiting = sessions.waiting
        for ticket in tickets:
            ticket.cancel()
        return waiting

    assert server.wait(server.service.front.call(look)) == 2, "one is on the row, one behind it, one without a row"


def test_metrics_tell_of_checkpoints_where_there_are_any(serve, tmp_path):
    server = serve()
    found = metrics(server)
    assert not [name for name in found if name.startswith("txl_checkpoint")]
    with Checkpoint(tmp_path / "kept", server.model.manifest.model_id) as checkpoint:
        keeping = server.service.keeping = Keeping(Log(True), checkpoint)
        keeping.restored, keeping.lost, keeping.failed = 4, 3, 2
        server.wait(keeping.end(server.sessions))
        found = metrics(server)
    assert 0 <= found["txl_checkpoint_age_seconds"] < 60
    assert (found["txl_checkpoints_total written"], found["txl_checkpoints_total failed"]) == (1, 2)
    assert (found["txl_sessions_restored"], found["txl_sessions_lost_total"]) == (4, 3)


def test_metrics_tell_what_runs_and_what_it_takes(served):
    text = served.get("/metrics").text
    (build,) = (line for line in text.splitlines() if line.startswith("txl_build_info"))
    assert f'model_id="{served.model.manifest.model_id}"' in build
    assert f'version="{version("txl-deploy")}"' in build
    if sys.platform == "linux":
        assert metrics(served)["process_resident_memory_bytes"] > 1 << 20


def test_a_checkout_that_is_not_installed_is_served_too(letters, monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("txl_deploy.extras.version", missing)
    server = Served(letters)
    assert 'version="not installed as a package"' in server.get("/metrics").text
    assert server.get("/", headers={"accept": "application/json"}).json()["version"] == "not installed as a package"
    server.close()


def test_health_tells_when_the_sessions_are_gone(letters):
    server = Served(letters)
    server.wait(server._front.__aexit__(None, None, None))
    answer = server.get("/health")
    assert answer.status_code == 503
    assert "closed" in answer.json()["problem"]
    server.close()
