"""What is served, text to ids and back, health and metrics."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families


def test_the_model_is_listed_with_its_shapes(served):
    (model,) = served.get("/v1/models").json()["data"]
    assert model == served.get("/v1/models/small").json()
    assert (model["id"], model["object"], model["reads_text"], model["batch_size"]) == ("small", "model", True, 3)
    assert model["model_id"] == served.model.manifest.model_id
    assert [entry["name"] for entry in model["inputs"]] == ["tokens"]
    assert (model["segment_lengths"], model["memory_length"], model["attention"]) == ([4, 1], 7, False)
    assert (model["vocab_size"], model["context"]) == (256, served.model.manifest.reach)
    settings = served.settings
    assert model["limits"] == {
        "prompt_tokens": settings.prompt_tokens,
        "max_tokens": settings.max_tokens,
        "body_bytes": settings.body_bytes,
        "logprobs": 20,
        "answer_logprobs": 1 << 19,
    }
    assert served.request("HEAD", "/v1/models").status_code == 200


@pytest.mark.parametrize("text", ["", "abc", "é€😀", "a\nb\n", "\0"])
def test_text_to_ids_and_back(served, text):
    found = served.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    assert found["tokens"] == list(text.encode())
    assert found["count"] == len(found["tokens"])
    assert served.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}


def test_tokens_by_name(served):
    found = served.post("/tokenize", {"prompt": "aé", "return_token_strs": True}).json()
    assert found["token_strs"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]


@pytest.mark.parametrize("tokens", [[256], [-1], [1 << 70]])
def test_ids_of_no_token(served, tokens):
    error = served.refused(400, path="/detokenize", json={"tokens": tokens})
    assert error["param"] == "tokens"


def test_the_boundary_token_begins_and_ends_texts(served, serve):
    info = served.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["boundary_token_id"]) == ("\n", "\n", 10)
    assert info["vocab_size"] == 256


def test_health_replays_the_self_test_once_a_minute(serve, monkeypatch):
    from txl_deploy.serve import health

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
    from txl_runtime.errors import CheckError

    from txl_deploy.serve import health

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


def test_health_tells_when_the_sessions_are_gone(letters):
    from serving import Served

    server = Served(letters)
    server.wait(server._front.__aexit__(None, None, None))
    answer = server.get("/health")
    assert answer.status_code == 503
    assert "closed" in answer.json()["problem"]
    server.close()
