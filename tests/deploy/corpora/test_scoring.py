"""Documents beside each other score as each of them alone, whatever the model and their lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import txl_runtime
from frozen import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_ins.steps import speaking, spoken
from step_models import VOCABULARY, B, counting, recurrent
from txl_runtime.errors import BackendError, UsageError

from txl_deploy.corpora import scoring
from txl_deploy.corpora.documents import Unit
from txl_deploy.corpora.scoring import Scorer, batches, on_threads, rows_of


def unit(ids: np.ndarray, index: int = 0) -> Unit:
    return Unit(index, "", "", 0, ids.astype(np.int32), len(ids))


def totals(found: list[float | str]) -> list[float]:
    assert all(isinstance(each, float) for each in found), found
    return [float(each) for each in found]


@given(
    st.lists(st.one_of(st.integers(0, 3), st.integers(0, 300)), max_size=60),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(1, 400),
)
def test_every_document_is_in_one_batch(lengths: list[int], rows: int, documents: int, tokens: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"MOST_DOCUMENTS": documents, "ENOUGH_TOKENS": tokens, "MOST_TOKENS": 3 * tokens}.items():
            patched.setattr(scoring, name, value)
        made = list(batches((unit(np.zeros(length), index) for index, length in enumerate(lengths)), rows))
    assert sorted(each.index for batch in made for each in batch) == list(range(len(lengths)))
    for batch in made:
        assert 1 <= len(batch) <= rows
        found = [len(each.ids) for each in batch]
        assert found == sorted(found, reverse=True)


def test_padding_is_small() -> None:
    lengths = np.random.default_rng(0).geometric(1 / 300, 4000).tolist()
    made = batches((unit(np.zeros(length), index) for index, length in enumerate(lengths)), 16)
    computed = sum(len(batch) * len(batch[0].ids) for batch in made)
    in_order = sum(max(lengths[first : first + 16]) * 16 for first in range(0, 4000, 16))
    assert computed < 1.05 * sum(lengths) < 0.4 * in_order


@pytest.fixture(scope="module")
def model() -> txl_runtime.Model:
    return txl_runtime.load(frozen("0.8/clusters"), threads=1)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(0, 45), min_size=1, max_size=2), chunk=st.integers(1, 3))
def test_documents_beside_each_other_score_as_alone(model: txl_runtime.Model, lengths: list[int], chunk: int) -> None:
    draws, shares = np.random.default_rng(sum(lengths)), list[float]()
    documents = [draws.integers(41, size=length) for length in lengths]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scoring, "SEGMENTS_PER_CALL", chunk)
        scorer = Scorer(model)
    for _ in range(2):  # from fresh memory each time
        found = totals(scorer.score([unit(ids) for ids in documents], lambda units, share: shares.append(share)))
        for ids, total in zip(documents, found, strict=True):
            expected = model.stream(1).score(ids[None])[0].sum(dtype=np.float64) if len(ids) else 0
            assert total == pytest.approx(float(expected), abs=1e-4 * max(len(ids), 1))
    steps = -(-max(max(lengths) - 1, 0) // (chunk * model.segment_lengths[0]))
    assert len(shares) == 2 * steps
    assert sum(shares) == pytest.approx(2 if steps else 0)


def test_threads_score_as_one_does(model: txl_runtime.Model) -> None:
    draws = np.random.default_rng(0)
    work = [[unit(draws.integers(41, size=2 + at % 7), at)] for at in range(40)]
    expected = [Scorer(model).score(batch) for batch in work]
    found = {batch[0].index: result for batch, result in on_threads(model, work, 3, lambda units, share: None)}
    assert [found[at] for at in range(40)] == expected


def test_threads_end_with_whoever_takes_their_results(model: txl_runtime.Model) -> None:
    """In the middle of documents that would take minutes."""
    long, told = unit(np.zeros(10_000_000)), list[float]()
    scored = on_threads(model, [[long], [long], [unit(np.zeros(2))]], 3, lambda units, share: told.append(share))
    assert len(next(scored)[0][0].ids) == 2
    scored.close()
    assert sum(told) < 1.5


def test_a_document_without_numbers_is_named_and_its_neighbour_has_a_result(
    model: txl_runtime.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(self: Any, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return np.where(np.arange(len(tokens))[:, None] == 0, np.nan, 1.0) * np.ones((1, tokens.shape[1] - 1))

    monkeypatch.setattr("txl_runtime.streaming.stream.Stream.score", score)
    first, second = Scorer(model).score([unit(np.arange(5)), unit(np.arange(4))])
    assert "add up to nan, expected a number" in str(first)
    assert second == 3


def test_where_the_engine_fails_only_what_fails_alone_has_no_result(
    model: txl_runtime.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for two documents beside each other, and always for one of them."""
    real, calls = txl_runtime.Stream.score, list[int]()

    def score(self: Any, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        calls.append(len(calls))
        if calls == [0] or (tokens == 40).any():
            raise BackendError("out of memory just now")
        return real(self, tokens, lengths)

    good, other, bad = unit(np.arange(5)), unit(np.arange(4)), unit(np.array([3, 40, 4]))
    expected = totals(Scorer(model).score([good, other]))
    monkeypatch.setattr("txl_runtime.streaming.stream.Stream.score", score)
    assert Scorer(model).score([good, other]) == pytest.approx(expected, abs=1e-4)
    first, second = Scorer(model).score([bad, good])
    assert first == "out of memory just now"
    assert second == pytest.approx(expected[0], abs=1e-4)


@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (counting, B),
        (lambda: speaking(("B", "L")), 1),
        (lambda: speaking(("B", "L"), streams="lockstep"), 1),
        (lambda: speaking(("B",), (1,)), 1),
    ],
    ids=["any lengths", "whole segments", "in lockstep", "one by one"],
)
def test_models_that_cannot_take_different_lengths_take_one_document(make: Any, rows: int, tmp_path: Path) -> None:
    found = make()
    model = txl_runtime.load(found.write(tmp_path / "model.txl"), threads=1)
    assert rows_of(model.manifest) == rows
    scorer, draws = Scorer(model), np.random.default_rng(0)
    start = found.tensors.get("initial.seen", np.zeros(VOCABULARY))
    for _ in range(2):
        documents = [draws.integers(VOCABULARY, size=draws.integers(2, 30)) for _ in range(rows)]
        for ids, total in zip(documents, scorer.score([unit(ids) for ids in documents]), strict=True):
            logprobs = spoken(ids[None], start)[0]
            assert total == pytest.approx(-logprobs[np.arange(len(ids) - 1), ids[1:]].sum(), abs=1e-4)


def test_lengths_that_a_model_does_not_have_are_the_documents_error(tmp_path: Path) -> None:
    model = txl_runtime.load(speaking(("B", "L"), (4,)).write(tmp_path / "model.txl"), threads=1)
    whole, rest = (Scorer(model).score([unit(np.arange(length))])[0] for length in (9, 8))
    assert isinstance(whole, float)
    assert "there are 7 positions" in str(rest)


def test_a_model_that_cannot_score_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="score takes token ids alone"):
        Scorer(txl_runtime.load(recurrent().write(tmp_path / "model.txl")))
