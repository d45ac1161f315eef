"""`serve --datastore`: every draw searches the store; what cannot be served with is refused at the start."""

from __future__ import annotations

import numpy as np
import pytest
import txl_runtime
from serving import serving
from support import call_main
from txl_runtime.streaming.datastore import mixed

from txl_deploy.retrieval import Mixture
from txl_deploy.retrieval.building import build
from txl_deploy.retrieval.store import open_store

LINE = "is the input of the next one. "


@pytest.fixture(scope="module")
def store(letters, tmp_path_factory):
    place = tmp_path_factory.mktemp("stores")
    (place / "text.txt").write_text(LINE * 20)
    build(txl_runtime.load(letters, "cpu", threads=1), [place / "text.txt"], place / "store")
    return place / "store"


def test_a_server_draws_with_its_store(serve, letters, store):
    asked = {"prompt": ["is the input of", "the next"], "temperature": 0, "max_tokens": 20}
    answer = serve(letters, mixture=Mixture(store, None, 0.01, 0.99)).complete(**asked)
    model = txl_runtime.load(letters, "cpu", threads=1)
    opened = open_store(model, Mixture(store, temperature=0.01, weight=0.99))
    for prompt, choice in zip(asked["prompt"], answer["choices"], strict=True):
        expected = model.stream(1).generate(f"\n{prompt}", 20, temperature=0, datastore=opened)
        assert choice["text"] == "".join(text for (text,) in expected.texts())
        assert set(choice["text"]) <= set(LINE)


def test_the_first_line_names_the_store(letters, store):
    with serving(letters, "--datastore", store) as server:
        assert server.ready["datastore"] == str(store)


def test_what_is_no_store_is_refused_at_the_start(monkeypatch, capfd, letters, tmp_path):
    called = call_main(("serve", letters, "--port", 0, "--datastore", tmp_path), monkeypatch, capfd)
    assert called.code == 2
    assert "expected a datastore; build one there first" in called.stderr


@pytest.fixture
def playground(serve, letters, store):
    return serve(letters, mixture=Mixture(store, 4, 0.01, 0.6), local=True)


def test_the_playground_shows_the_neighbours_behind_an_alternative(playground, letters, store):
    assert playground.get("/v1/models").json()["data"][0]["limits"]["neighbours_tokens"] == 4096
    answer = playground.post("/v1/neighbours", {"prompt": LINE[:13], "alternatives": 3, "neighbours": 2}).json()
    model = txl_runtime.load(letters, "cpu", threads=1)
    opened = open_store(model, Mixture(store, 4, 0.01, 0.6))
    features = model.stream(1).features(LINE[:13])[0, -1:]
    tokens, shares = opened.shares(features, lambda: np.zeros(1))
    alone = model.stream(1).feed(LINE[:13], last=True)[0].astype(np.float64)
    row = np.exp(mixed(alone, tokens[0], shares[0]))
    assert (answer["searched"], answer["weight"]) == (True, pytest.approx(0.6))
    assert [each["id"] for each in answer["alternatives"]] == np.argsort(-row)[:3].tolist()
    for each in answer["alternatives"]:
        assert each["probability"] == pytest.approx(row[each["id"]], rel=1e-5)
        assert each["without"] == pytest.approx(np.exp(alone[each["id"]]), rel=1e-5)
    assert len(answer["neighbours"]) == 2
    for near in answer["neighbours"]:
        whole = "\n" + LINE * 20  # as it was read, behind the boundary token
        at = near["position"]
        assert (near["text"], whole[at]) == ("text.txt", near["token"])
        assert whole[:at].endswith(near["before"])
        assert whole[at + 1 :].startswith(near["after"])
        assert near["after"]
        assert near["share"] == pytest.approx(shares[0][np.isin(tokens[0], near["id"])].max())


@pytest.mark.parametrize(
    ("body", "status", "expected"),
    [
        ({"prompt": ""}, 400, "the prompt has 0 tokens, expected 1 … 4096"),
        ({"prompt": [300]}, 400, "300"),
        ({"prompt": "a", "neighbours": 99}, 400, "neighbours is 99, expected 1 … 32"),
        ({"prompt": "a", "alternatives": 0}, 400, "alternatives is 0, expected 1 … 20"),
        ({"prompt": 5}, 400, "prompt"),
        ({"prompt": "a", "model": "other"}, 404, "other"),
    ],
)
def test_a_wrong_question_for_neighbours_is_refused(playground, body, status, expected):
    assert expected in playground.refused(status, "POST", "/v1/neighbours", json=body)["message"]


def test_a_server_that_is_no_playground_shows_no_passages(serve, letters, store):
    """Whoever may ask it must not read what its store has read; and without a store there are no neighbours."""
    for server in (serve(letters, mixture=Mixture(store)), serve(letters, local=True)):
        assert server.get("/v1/models").json()["data"][0]["limits"]["neighbours_tokens"] == 0
        error = server.refused(404, "POST", "/v1/neighbours", json={"prompt": "a"})
        assert "neighbours are shown by the playground with a datastore alone" in error["message"]
