"""The nearest rows: those of a comparison in float64, whatever the search; and how many of them clusters find."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
from oracle_stateful import FOLDER
from txl_runtime.errors import BackendError, UsageError
from txl_runtime.streaming.datastore import mixed

from txl_deploy.retrieval import searching
from txl_deploy.retrieval.searching import Clustered, Exact, nearest, write_index
from txl_deploy.retrieval.store import Store

needs_faiss = pytest.mark.skipif(
    importlib.util.find_spec("faiss") is None, reason="faiss is not installed: pip install -e '.[knn]'"
)


def rows_of(count: int, width: int = 24, seed: int = 0) -> np.ndarray:
    """Features around a few centres, as those of a text are."""
    draws = np.random.default_rng(seed)
    centres = draws.normal(size=(count // 50, width))
    found: np.ndarray = (
        centres[draws.integers(len(centres), size=count)] + draws.normal(size=(count, width)) / 4
    ).astype(np.float16)
    return found


def brute(features: np.ndarray, queries: np.ndarray, count: int, hidden: tuple[int, int] = (0, 0)) -> np.ndarray:
    far = np.square(features.astype(np.float64)[None] - queries[:, None]).sum(2)
    far[:, slice(*hidden)] = np.inf
    return np.argsort(far, axis=1, kind="stable")[:, :count]


@pytest.mark.parametrize("hidden", [(0, 0), (100, 1900)])
def test_an_exact_search_finds_what_a_comparison_in_float64_finds(hidden):
    features, queries = rows_of(2000), rows_of(100, seed=1).astype(np.float32)[:40]
    rows, far = nearest(Exact(features), features, queries, 7, hidden)
    np.testing.assert_array_equal(rows, brute(features, queries, 7, hidden))
    np.testing.assert_allclose(far, np.square(features[rows].astype(np.float64) - queries[:, None]).sum(2), rtol=1e-12)


def test_of_equal_rows_the_first_is_nearer():
    features = np.repeat(rows_of(50, 4), 3, axis=0)
    rows, far = nearest(Exact(features), features, features[[30]].astype(np.float32), 3, (0, 0))
    assert rows.tolist() == [[30, 31, 32]]
    assert not far.any()


@pytest.mark.parametrize("hidden", [(0, 0), (0, 20)])
def test_of_more_equal_rows_than_candidates_the_first_are_found(hidden):
    features = rows_of(900)
    ties = np.random.default_rng(3).choice(900, 300, replace=False)
    features[ties] = features[ties[0]]
    query = features[ties[:1]].astype(np.float32)
    rows = nearest(Exact(features), features, query, 5, hidden)[0]
    np.testing.assert_array_equal(rows, brute(features, query, 5, hidden))


def test_where_there_are_fewer_rows_the_rest_is_infinitely_far():
    features = rows_of(50, 4)[:9]
    rows, far = nearest(Exact(features), features, features[:2].astype(np.float32), 5, (1, 8))
    assert np.isinf(far[:, 2:]).all()
    assert sorted(rows[0, :2].tolist()) == [0, 8]
    assert np.isinf(nearest(Exact(features), features, features[:1].astype(np.float32), 5, (0, 9))[1]).all()


def test_the_case_of_the_package_is_reproduced():
    """Case kn01, whose store is float32: log p_neighbours, and the mixture of it."""
    case = json.loads((FOLDER / "kn01_knnlm.json").read_text())["config"]
    given, expected = (np.load(FOLDER / f"kn01_knnlm{name}.npz") for name in ("", ".f64"))
    keys, values = given["sd/keys"], given["sd/values"].astype(np.int32)
    store = Store(Exact(keys), keys, values, {}, case["k"], case["temperature"], case["lmbda"])
    for segment in range(4):
        queries, logprobs = given[f"in/{segment}/queries"], given[f"in/{segment}/lm_logprobs"].astype(np.float64)
        tokens, shares = store.shares(queries, lambda: np.zeros(0))
        found = np.stack([mixed(*each) for each in zip(logprobs, tokens, shares, strict=True)])
        np.testing.assert_allclose(found, expected[f"out/{segment}/logprobs"], rtol=0, atol=1e-5)
        neighbours = np.zeros(found.shape)
        np.add.at(neighbours, (np.arange(len(tokens))[:, None], tokens), shares / case["lmbda"])
        theirs = np.exp(expected[f"out/{segment}/knn_logprobs"])
        np.testing.assert_allclose(neighbours, theirs, rtol=0, atol=1e-5)


@needs_faiss
def test_clusters_find_nearly_all_neighbours(tmp_path):
    features, queries = rows_of(20_000), rows_of(1000, seed=1).astype(np.float32)[:100]
    told = list[int]()
    write_index(tmp_path / "index.faiss", features, told.append)
    assert sum(told) == 20_000
    found = nearest(Clustered(tmp_path, features.shape), features, queries, 10, (0, 0))[0]
    expected = brute(features, queries, 10)
    recall = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found.tolist(), expected.tolist(), strict=True)])
    assert recall > 0.95
    hidden = nearest(Clustered(tmp_path, features.shape), features, queries, 10, (0, 15_000))[0]
    assert hidden[hidden >= 0].min() >= 15_000
    assert (hidden >= 0).mean() > 0.9


@needs_faiss
def test_rows_are_added_to_clusters_that_are_there(tmp_path):
    features = rows_of(6000)
    write_index(tmp_path / "index.faiss", features[:4000], lambda rows: None)
    write_index(tmp_path / "index.faiss", features, lambda rows: None, (tmp_path / "index.faiss", 4000))
    found = nearest(Clustered(tmp_path, features.shape), features, features[5000:5050].astype(np.float32), 1, (0, 0))[0]
    assert (found[:, 0] == np.arange(5000, 5050)).mean() > 0.95


@needs_faiss
def test_an_index_that_faiss_cannot_read_is_named(tmp_path):
    (tmp_path / "index.faiss").write_bytes(b"no index")
    with pytest.raises(UsageError, match=r"index\.faiss: faiss cannot read it, expected its index; build it again"):
        Clustered(tmp_path, (1, 24))


@needs_faiss
def test_an_index_of_other_rows_is_named(tmp_path):
    write_index(tmp_path / "index.faiss", rows_of(4000), lambda rows: None)
    with pytest.raises(UsageError, match=r"has 4000 rows of 24 numbers, expected 4001 of 24; build it again"):
        Clustered(tmp_path, (4001, 24))


def test_without_faiss_a_large_store_is_refused(monkeypatch):
    monkeypatch.setattr("txl_deploy.extras.find_spec", lambda name: None)
    searching.require_faiss(searching.EXACT_ROWS)
    with pytest.raises(BackendError, match=r"a datastore of this size needs faiss, not installed here; pip install"):
        searching.require_faiss(searching.EXACT_ROWS + 1)
