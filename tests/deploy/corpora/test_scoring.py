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
from txl_deploy.corpora.scoring import Scorer, rows_of


def unit(ids: np.ndarray, index: int = 0, skipped: int = 0) -> Unit:
    return Unit(index, "", "", 0, ids.astype(np.int32).tobytes(), len(ids), skipped=skipped)


@pytest.fixture(scope="module")
def model() -> txl_runtime.Model:
    return txl_runtime.load(frozen("0.8/clusters"), threads=1)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 45), min_size=1, max_size=2), skipped=st.integers(0, 12), chunk=st.integers(1, 3)
)
def test_documents_beside_each_other_score_as_alone(
    model: txl_runtime.Model, lengths: list[int], skipped: int, chunk: int
) -> None:
    draws = np.random.default_rng(sum(lengths))
    documents = [draws.integers(41, size=length) for length in lengths]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scoring, "SEGMENTS_PER_CALL", chunk)
        scorer = Scorer(model)
    for _ in range(2):  # from fresh memory each time
        outcomes = scorer.score([unit(ids, skipped=skipped) for ids in documents])
        for ids, outcome in zip(documents, outcomes, strict=True):
            expected = model.stream(1).score(ids[None])[0, skipped:].sum(dtype=np.float64) if len(ids) else 0
            assert outcome.why is None
            assert outcome.total == pytest.approx(float(expected), abs=1e-4 * max(len(ids), 1))


def test_how_far_a_long_document_is_is_told(model: txl_runtime.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "SEGMENTS_PER_CALL", 1)
    shares: list[float] = []
    Scorer(model).score([unit(np.arange(41)), unit(np.arange(9))], shares.append)
    assert len(shares) == -(-40 // model.segment_lengths[0])
    assert shares == sorted(set(shares))
    assert 0 < shares[0] < 0.5
    assert shares[-1] == 1


def test_a_document_without_numbers_is_named_and_its_neighbour_has_a_result(
    model: txl_runtime.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(self: Any, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return np.where(np.arange(len(tokens))[:, None] == 0, np.nan, 1.0) * np.ones((1, tokens.shape[1] - 1))

    monkeypatch.setattr("txl_runtime.streaming.stream.Stream.score", score)
    first, second = Scorer(model).score([unit(np.arange(5)), unit(np.arange(4))])
    assert first.total is None
    assert "add up to nan, expected a number" in str(first.why)
    assert second.total == 3


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
    expected = Scorer(model).score([good, other])
    monkeypatch.setattr("txl_runtime.streaming.stream.Stream.score", score)
    assert [each.total for each in Scorer(model).score([good, other])] == pytest.approx(
        [each.total for each in expected], abs=1e-4
    )
    first, second = Scorer(model).score([bad, good])
    assert (first.total, first.why) == (None, "out of memory just now")
    assert second.total == pytest.approx(expected[0].total, abs=1e-4)


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
        for ids, outcome in zip(documents, scorer.score([unit(ids) for ids in documents]), strict=True):
            logprobs = spoken(ids[None], start)[0]
            assert outcome.total == pytest.approx(-logprobs[np.arange(len(ids) - 1), ids[1:]].sum(), abs=1e-4)


def test_lengths_that_a_model_does_not_have_are_the_documents_error(tmp_path: Path) -> None:
    model = txl_runtime.load(speaking(("B", "L"), (4,)).write(tmp_path / "model.txl"), threads=1)
    whole, rest = (Scorer(model).score([unit(np.arange(length))])[0] for length in (9, 8))
    assert whole.why is None
    assert "there are 7 positions" in str(rest.why)


def test_a_model_that_cannot_score_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="score takes token ids alone"):
        Scorer(txl_runtime.load(recurrent().write(tmp_path / "model.txl")))
