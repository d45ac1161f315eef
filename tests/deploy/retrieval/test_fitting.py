"""`txl-deploy datastore fit`: the gate, a bundle beside the store, and what score and generate do with it."""

from __future__ import annotations

import json
import random
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import txl_runtime
from frozen import frozen
from txl_runtime.errors import UsageError
from txl_runtime.streaming.datastore import entropies

from txl_deploy.retrieval import Mixture, fitting, gate
from txl_deploy.retrieval.building import build
from txl_deploy.retrieval.fitting import Positions
from txl_deploy.retrieval.folder import hash_of, read_header
from txl_deploy.retrieval.store import open_store, softmax

LETTERS = frozen("clusters")
"""A Transformer-XL that reads bytes, in two clusters."""
LINE = "is the input of the next one. "


def text(seed: int) -> str:
    """Lines that the store knows, between letters that nothing foretells."""
    draws = random.Random(seed)
    return "".join(LINE + "".join(draws.choices("abcdefgh", k=20)) + "\n" for _ in range(30))


@pytest.fixture(scope="module")
def model() -> txl_runtime.Model:
    return txl_runtime.load(LETTERS, "cpu", threads=1)


@pytest.fixture(scope="module")
def fitted(model: txl_runtime.Model, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A store with a gate, which no test changes, and what `fit` said."""
    place = tmp_path_factory.mktemp("fitted")
    (place / "read.txt").write_text(text(0))
    (place / "heldout.txt").write_text(text(1))
    build(model, [place / "read.txt"], place / "store")
    return place / "store", fitting.fit(model, place / "store", place / "heldout.txt", neighbours=4)


@pytest.fixture
def store(fitted: Any, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(fitted[0], tmp_path / "store"))


def rebound(store: Path, **changes: Any) -> None:
    """Change what `gate.json` says."""
    about = msgspec.json.decode((store / gate.ABOUT).read_bytes(), type=gate.About)
    gate.write_about(store, msgspec.structs.replace(about, **changes))


def test_a_gate_gains_more_than_one_weight(fitted):
    found = fitted[1]
    assert found["bits_with_the_gate"] < found["bits_with_one_weight"] < found["bits_without"]
    assert found["judged_on"] == pytest.approx(found["positions"] / 5, abs=1)
    bounds = list(found["by_bound"].values())
    assert [saved for _, saved in bounds] == sorted(saved for _, saved in bounds)


def test_a_gate_is_a_verified_bundle(fitted):
    opened = txl_runtime.load(fitted[0] / "gate.txl")
    assert 0 < opened.manifest.parity["outputs max abs (relative)"] < 1e-4
    assert {entry.name for entry in opened.manifest.outputs} == {"before", "weight"}


def test_scores_are_those_of_the_formula_with_the_gates_weights(model, store):
    """The two outputs of its bundle, run by hand for one position at a time."""
    ids = np.frombuffer(text(2).encode(), np.uint8).astype(np.int32)[:200]
    stream, one = model.stream(1), txl_runtime.load(store / "gate.txl").stream(1)
    features, logprobs = stream.features(ids[None])[0, :-1], model.stream(1).feed(ids[None])[0, :-1]
    entropy = entropies(stream.loop.output, features)
    nothing = np.zeros((1, 4), np.float32)
    given = [
        {"feature": feature[None], "entropy": np.array([[one_entropy]], np.float32)}
        for feature, one_entropy in zip(features, entropy, strict=True)
    ]
    before = [float(one.run({**each, "distances": nothing})["before"][0, 0]) for each in given]
    bound = float(np.median(before))
    rebound(store, bound=bound)
    opened = open_store(model, Mixture(store, weight="gate"))
    assert opened is not None
    about = opened._weight.about
    found = model.stream(1).score(ids[None], datastore=opened)[0]
    followed, far = opened.nearest(features)
    expected, made = list[float](), 0
    for at, target in enumerate(ids[1:]):
        weight = 0.0
        if before[at] >= bound:
            weight = float(one.run({**given[at], "distances": far[[at]].astype(np.float32)})["weight"][0, 0])
            made += 1
        hits = (softmax(far[[at]], about.temperature)[0] * (followed[at] == target)).sum()
        expected.append(-np.log(weight * hits + (1 - weight) * np.exp(float(logprobs[at, target]))))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert (opened.searches.positions, opened.searches.made) == (199, made)
    assert 0 < made < 199


def test_where_no_search_is_worth_it_the_model_is_alone_to_the_bit(run, store, tmp_path):
    rebound(store, bound=0.995)
    (tmp_path / "text.txt").write_text(text(2))
    for verb, arguments in (
        ("score", (tmp_path / "text.txt",)),
        ("generate", ("--prompt", "is the", "--seed", 1, "--max-new-tokens", 30)),
    ):
        plain = run(verb, LETTERS, *arguments, "--json").document
        gated = run(verb, LETTERS, *arguments, "--datastore", store, "--knn-weight", "gate", "--json")
        assert {**gated.document, "seconds": 0} == {**plain, "seconds": 0}
        assert "searches, 100%" in " ".join(gated.stderr.split())


def test_generating_searches_as_the_gate_says(run, store):
    asked = ("--prompt", "is the input of", "--temperature", 0, "--max-new-tokens", 20, "--datastore", store)
    rebound(store, bound=0.0)
    assert run("generate", LETTERS, *asked, "--knn-weight", "gate", "--json").document["text"].startswith(" the next")


def test_a_gate_that_is_not_this_stores_is_named(run, store):
    asked = ("generate", LETTERS, "--prompt", "x", "--max-new-tokens", 1, "--datastore", store, "--knn-weight", "gate")
    for changes, expected in (
        ({"model_id": "0" * 64}, "is of softmax features of model 000000000000, expected softmax features of"),
        ({"feature": "feed-forward"}, "is of feed-forward features of model"),
        ({"neighbours": 5}, "expected the gate"),
        ({"gate_id": "1" * 64}, "expected the gate 111111111111"),
    ):
        before = (store / gate.ABOUT).read_bytes()
        rebound(store, **changes)
        assert expected in run(*asked).error
        (store / gate.ABOUT).write_bytes(before)
    assert "--knn and --knn-temperature are 9 and" in run(*asked, "--knn", 9).error
    (graph,) = (store / gate.BUNDLE).glob("step-1.onnx")
    graph.write_bytes(graph.read_bytes()[:-1] + b"\0")
    assert "step-1.onnx" in run(*asked).error
    (store / gate.ABOUT).write_text("{}")
    assert "gate.json: " in run(*asked).error
    (store / gate.ABOUT).unlink()
    assert "gate.json: No such file or directory, expected a gate; fit it again" in run(*asked).error


def test_a_gate_that_says_no_share_is_named(model, store, monkeypatch):
    """A bundle that somebody else wrote may return anything."""
    opened = gate.open_gate(store, read_header(store, model.manifest.model_id))
    wrong = {"before": np.full((gate.BATCH, 1), 2.0), "weight": np.full((gate.BATCH, 1), np.nan)}
    monkeypatch.setattr(opened._model, "stream", lambda: SimpleNamespace(run=lambda *_: wrong), raising=False)
    for asked in (opened.worthwhile, partial(opened.weights, far=np.zeros((1, 4)))):
        with pytest.raises(UsageError, match="a W that is not from 0 to 1; fit it again"):
            asked(np.zeros((1, opened._model.manifest.inputs[0].shape[1]), np.float32), np.zeros(1))


@pytest.mark.parametrize("changes", [{"outputs": ()}, {"batch_size": 8}], ids=["no outputs", "fewer sequences"])
def test_a_gate_of_a_different_form_is_refused_when_it_is_opened(model, store, monkeypatch, changes):
    own = txl_runtime.load(store / gate.BUNDLE, "cpu", threads=1).manifest
    other = SimpleNamespace(manifest=msgspec.structs.replace(own, **changes))
    monkeypatch.setattr(gate.txl_runtime, "load", lambda *_, **__: other)
    with pytest.raises(UsageError, match="expected the gate"):
        gate.open_gate(store, read_header(store, model.manifest.model_id))


def test_a_token_that_nobody_expects_is_a_finite_loss():
    far, hits = np.full((1, 4), 1.0), np.zeros((1, 4), np.bool_)
    position = Positions({}, far, hits, np.array([800.0]))
    assert np.isfinite(position.loss(0.5, position.found(1.0)))


def test_what_no_gate_can_be_fitted_to_is_refused(run, store, tmp_path):
    (tmp_path / "short.txt").write_text(LINE)
    for arguments, expected in (
        ((store, LETTERS, tmp_path / "short.txt"), "holds 29 positions, expected at least 1,000 to fit a gate to"),
        ((store, LETTERS), "is given 2 paths, expected DIR BUNDLE HELDOUT"),
        ((store, LETTERS, tmp_path / "short.txt", "--bound", 1), "--bound is 1.0, expected at least 0 and less than 1"),
        (
            (store, LETTERS, tmp_path / "short.txt", "--append"),
            "--append is for datastore build, expected none for fit",
        ),
        ((store, LETTERS, tmp_path / "short.txt", "--knn", 0), "--knn is 0, expected 1 … 1024"),
    ):
        assert expected in run("datastore", "fit", *arguments).error
    wrong = run("datastore", "build", LETTERS, tmp_path / "short.txt", "-o", tmp_path / "other", "--bound", 0.1)
    assert "--bound is for datastore fit, expected none for build" in wrong.error
    assert "needs a BUNDLE, texts and -o DIR" in run("datastore", "build", LETTERS, tmp_path / "short.txt").error


def test_the_command_says_what_the_gate_gains(run, store, tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "ROUNDS", 1)
    (tmp_path / "heldout.txt").write_text(text(1))
    called = run("datastore", "fit", store, LETTERS, tmp_path / "heldout.txt", "--knn", 3, "--bound", 0.02)
    about = json.loads((store / gate.ABOUT).read_text())
    assert (about["neighbours"], about["bound"]) == (3, 0.02)
    assert "bits with the gate" in called.stdout
    assert "of the searches saved" in called.stdout


def test_rows_of_the_measured_text_are_not_counted_as_read(model, store):
    opened = open_store(model, Mixture(store))
    tokens = np.asarray(opened._tokens)
    opened._texts = {hash_of(tokens): (0, len(tokens))}
    assert opened.seen(256).sum() == len(tokens)
    assert opened.excluding(tokens).seen(256).sum() == 0


def test_the_report_has_a_section_with_the_store(run, store, tmp_path):
    (tmp_path / "text.txt").write_text(text(2))
    page = ("report", LETTERS, "-o", tmp_path / "page.html", "--datastore", store, "--force")
    assert "--datastore is measured on a text, and none was given" in run(*page).error
    for weight, there in (("gate", True), (0, False)):
        found = run(*page, "--text", tmp_path / "text.txt", "--knn-weight", weight, "--json").document
        assert ("datastore" in {section["name"] for section in found["sections"]}) == there
