"""A store's neighbours, mixed into what the model says: by the formula, and not at all where their share is 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from drafting import Eager, windowed
from frozen import frozen
from sessions_alone import drawn, run
from txl_runtime import Model, Stream, UsageError, load
from txl_runtime.sessions import Request, Sampling, Sessions
from txl_runtime.streaming import lookup
from txl_runtime.streaming.datastore import mixed, mixed_nll

PROMPT = [[1, 70, 200, 9], [5, 6, 7, 8]]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
}


class Some:
    """A store whose neighbours follow from a feature: 5 tokens, of which some repeat."""

    def __init__(self, weight: float) -> None:
        self.weight, self.asked = weight, list[int]()

    def shares(self, features: np.ndarray, entropies: Any = None) -> tuple[np.ndarray, np.ndarray]:
        self.asked.append(len(features))
        found = np.abs(features[:, :1] * 1e4).astype(np.int32) % 250
        tokens = found + np.array([[0, 3, 0, 5, 3]], np.int32)
        return tokens, self.weight * np.tile([[0.4, 0.2, 0.1, 0.2, 0.1]], (len(features), 1))


@pytest.fixture(scope="module")
def model() -> Model:
    """Two sequences; a softmax of three clusters."""
    return load(frozen("clusters"), backend="cpu", threads=1)


def expected(logprobs: np.ndarray, tokens: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """log(p_neighbours + (1 - W) · p_model), all of it in probabilities."""
    neighbours = np.zeros(logprobs.shape)
    for at in np.ndindex(*shares.shape):
        neighbours[at[:-1]][tokens[at]] += shares[at]
    return np.log(neighbours + (1 - shares.sum(-1, keepdims=True)) * np.exp(logprobs.astype(np.float64)))


def test_features_are_what_the_softmax_reads(model):
    ids, lengths = np.random.default_rng(0).integers(256, size=(2, 33)), [33, 20]
    stream, other = model.stream(), model.stream()
    features, logprobs = stream.features(ids, lengths), other.feed(ids, lengths)
    found = np.zeros_like(logprobs)
    stream.loop.output.counted(features, np.array(lengths, np.int32), found)
    np.testing.assert_array_equal(found, logprobs)
    assert not features[1, 20:].any()
    assert stream.fill.tolist() == other.fill.tolist()


def test_scores_are_those_of_the_formula(model):
    ids, store = np.random.default_rng(1).integers(256, size=(2, 40)), Some(0.3)
    features, logprobs = model.stream().features(ids)[:, :-1], model.stream().feed(ids)[:, :-1]
    tokens, shares = (found.reshape(2, 39, 5) for found in store.shares(features.reshape(78, -1)))
    nll = -np.take_along_axis(expected(logprobs, tokens, shares), ids[:, 1:, None], 2)[:, :, 0]
    np.testing.assert_allclose(model.stream().score(ids, datastore=store), nll, atol=1e-5)
    part = model.stream().score(ids, [40, 11], datastore=store)
    np.testing.assert_allclose(part[1, :10], nll[1, :10], atol=1e-5)
    assert not part[1, 10:].any()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_draws_are_from_the_mixture(model, way):
    """As from the same row, handed over by `adjust`."""
    store, stream, twin = Some(0.6), model.stream(), model.stream()
    state, rows = model.stream(), list[np.ndarray]()
    last = np.array(PROMPT)

    def mixture(row: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        if not rows:
            snapshot = state.snapshot()
            features = state.features(last)[:, -1]
            state.restore(snapshot)
            rows.extend(expected(state.feed(last)[:, -1], *store.shares(features)))
        return rows.pop(0)

    drawn = stream.generate(PROMPT, 12, seed=3, datastore=store, **way)
    theirs = twin.generate(PROMPT, 12, seed=3, adjust=mixture, **way)
    for token, other in zip(drawn, theirs, strict=True):
        assert token.tolist() == other.tolist()
        last = token[:, None]
    assert set(store.asked[:1]) == {2}, "sequences of one store are searched for together"


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_share_of_zero_changes_no_bit(model, way):
    ids = np.random.default_rng(2).integers(256, size=(2, 50))
    plain, with_store = model.stream(), model.stream()
    np.testing.assert_array_equal(plain.score(ids), with_store.score(ids, datastore=Some(0.0)))
    drawn = [
        [token.tolist() for token in stream.generate(PROMPT, 30, seed=1, **options, **way)]
        for stream, options in ((plain, {}), (with_store, {"datastore": Some(0.0)}))
    ]
    assert drawn[0] == drawn[1]
    row = np.log(np.random.default_rng(0).dirichlet(np.ones(20)))
    assert mixed(row, np.array([3, 3, 7]), np.zeros(3)).tobytes() == row.tobytes()


def test_adjust_is_given_the_mixture(model):
    given = list[np.ndarray]()

    def keep(row: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        given.append(row.copy())
        return row

    store = Some(0.5)
    next(model.stream().generate(PROMPT, 1, datastore=store, adjust=keep))
    features, logprobs = model.stream().features(PROMPT)[:, -1], model.stream().feed(PROMPT, last=True)
    np.testing.assert_allclose(given, expected(logprobs, *store.shares(features)), atol=1e-6)


def test_sessions_draw_what_a_stream_draws(model):
    expects = [int(token[0]) for token in model.stream(1).generate(PROMPT[0], 10, seed=4, datastore=Some(0.6))]
    with Sessions(model) as sessions:
        sampling = Sampling(seed=4, datastore=Some(0.6))
        ticket = sessions.submit(Request(PROMPT[0], 10, sampling))
        run(sessions)
    assert drawn(ticket) == expects


def test_a_store_that_fails_ends_its_own_sessions_alone(model):
    with Sessions(model) as sessions:
        wrong, right = (
            sessions.submit(Request(PROMPT[0], 5, Sampling(seed=1, datastore=store)))
            for store in (Wrong([999], [0.1]), Some(0.5))
        )
        run(sessions)
    assert "tokens 999 … 999" in str(wrong.error)
    assert len(drawn(right)) == 5


def test_drafts_are_drawn_from_the_mixture(tmp_path, make_bundle, monkeypatch):
    """The tokens of single steps, where segments are as many steps."""

    class Coarse(Some):
        def shares(self, features: np.ndarray, entropies: Any = None) -> tuple[np.ndarray, np.ndarray]:
            nearest = features.argmax(axis=1)[:, None].astype(np.int32)
            return nearest, np.full((len(features), 1), self.weight)

    monkeypatch.setattr(lookup, "Pace", Eager)
    window = load(windowed(make_bundle, tmp_path / "b.txl"), "cpu", threads=1)
    drafting, plain = window.stream(1), window.stream(1)
    options = {"seed": 2, "temperature": 0.3, "datastore": Coarse(0.9)}
    tokens = [
        [int(token[0]) for token in stream.generate([1, 2, 1, 2, 1], 60, lookup=most, **options)]
        for stream, most in ((drafting, 4), (plain, 0))
    ]
    assert tokens[0] == tokens[1]
    assert drafting.draws.kept > 5
    without = [int(token[0]) for token in window.stream(1).generate([1, 2, 1, 2, 1], 60, seed=2, temperature=0.3)]
    assert without != tokens[0]


def test_what_is_no_store_is_refused(model):
    for call in (
        lambda stream: stream.score(PROMPT, datastore="notes"),
        lambda stream: stream.generate(PROMPT, 3, datastore="notes"),
    ):
        with pytest.raises(UsageError, match="datastore is 'notes', expected one that was opened"):
            call(model.stream())


class Wrong:
    """A store that returns the same for each position."""

    def __init__(self, tokens: Any, shares: Any) -> None:
        self.tokens, self.row = tokens, shares

    def shares(self, features: np.ndarray, entropies: Any = None) -> tuple[np.ndarray, np.ndarray]:
        return np.array([self.tokens] * len(features)), np.array([self.row] * len(features))


@pytest.mark.parametrize(
    ("tokens", "shares", "expected"),
    [
        ([1, 256], [0.1, 0.1], r"tokens 1 … 256, expected ids in 0 … 255"),
        ([-1, 2], [0.1, 0.1], r"tokens -1 … 2, expected ids in 0 … 255"),
        ([1.0, 2.0], [0.1, 0.1], "tokens of float64 and shares of float64, expected whole numbers"),
        ([1, 2, 3], [0.1, 0.1], r"shapes \[\d+, 3\] and \[\d+, 2\], expected \[\d+, K\] for both"),
        (1, 0.1, r"shapes \[\d+\] and \[\d+\], expected"),
        ([1, 2], [0.5, 0.5], "expected a sum below 1"),
        ([1, 2], [0.1, float("nan")], "expected a sum below 1"),
        ([1, 2], [0.5, -0.1], "expected a sum below 1"),
    ],
)
def test_what_a_store_may_not_return_is_named(model, tokens, shares, expected):
    store = Wrong(tokens, shares)
    for call in (
        lambda: model.stream().score(PROMPT, datastore=store),
        lambda: list(model.stream().generate(PROMPT, 3, datastore=store)),
    ):
        with pytest.raises(UsageError, match=f"a datastore returned .*{expected}"):
            call()


def test_a_store_that_returns_no_pair_is_named(model, monkeypatch):
    monkeypatch.setattr(Some, "shares", lambda self, features, entropies: None)
    with pytest.raises(UsageError, match="a datastore returned None, expected tokens and shares"):
        model.stream().score(PROMPT, datastore=Some(0.5))


def test_a_store_may_ask_for_entropies(model):
    """They are of the whole softmax at each position, when scoring and when drawing."""

    class Asking(Some):
        def shares(self, features: np.ndarray, entropies: Any = None) -> tuple[np.ndarray, np.ndarray]:
            self.asked += entropies().tolist()
            return super().shares(features)

    ids, store = np.random.default_rng(3).integers(256, size=(2, 40)), Asking(0.5)
    logprobs = model.stream().feed(ids)[:, :-1].astype(np.float64)
    expected = -(np.exp(logprobs) * logprobs).sum(-1)
    model.stream().score(ids, datastore=store)
    found = [entropy for entropy in store.asked if not float(entropy).is_integer()]
    assert sorted(found) == pytest.approx(sorted(expected.ravel()), abs=1e-5)
    store.asked.clear()
    next(model.stream().generate(ids, 1, datastore=store))
    last = model.stream().feed(ids, last=True).astype(np.float64)
    assert store.asked[:2] == pytest.approx(-(np.exp(last) * last).sum(-1), abs=1e-5)


def test_a_model_without_features_is_refused():
    stream: Stream = load(frozen("ring"), backend="cpu", threads=1, update="rolled").stream(1)
    for call in (
        lambda: stream.features([[1, 2]]),
        lambda: stream.score([[1, 2]], datastore=Some(0.5)),
        lambda: stream.generate([[1, 2]], 3, datastore=Some(0.5)),
    ):
        with pytest.raises(UsageError, match="programs return log-probabilities alone, expected the rows that enter"):
            call()


def test_a_target_no_neighbour_has_keeps_the_models_share():
    nll = mixed_nll(np.array([1.0], np.float32), np.array([9]), np.array([[1, 2]]), np.array([[0.1, 0.15]]))
    assert nll[0] == pytest.approx(1 - np.log(0.75), abs=1e-6)
