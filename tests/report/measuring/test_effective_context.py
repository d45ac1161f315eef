"""The effective context of a constructed model is found; losses and the rule are those of plain loops."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import txl_runtime
from copying import copying, loss, repeating
from frozen import frozen
from resealing import reseal
from step_models import recurrent
from txl_report.facts.plain import Missing
from txl_report.measuring import measure_context
from txl_report.measuring.context_length import first_small, gains_of, lengths_of, losses_by_context
from txl_runtime.listener import Silent


@pytest.fixture
def model() -> txl_runtime.Model:
    return txl_runtime.load(frozen("clusters"), threads=1)


def text(tokens: int, vocab_size: int = 256) -> np.ndarray:
    return np.random.default_rng(1).integers(0, vocab_size, tokens).astype(np.int32)


def plain_losses(model: txl_runtime.Model, ids: np.ndarray, step: int, lengths: int) -> np.ndarray:
    """Every token's loss with every context, each from a fresh stream that reads that context alone."""
    length = model.segment_lengths[0]
    losses = np.zeros((lengths, len(ids) - 1 - (lengths - 1) * step))
    for column in range(losses.shape[1]):
        target = (lengths - 1) * step + column + 1
        for index in range(lengths):
            start = (target - 1) // step * step - index * step
            stream, first = model.stream(1), start
            while first < target:
                last = min((first // length + 1) * length, target)
                found = stream.step(ids[None, first:last])[0, -1]
                first = last
            losses[index, column] = -found[ids[target]]
    return losses


def plain_rule(losses: np.ndarray) -> int:
    """The effective context in steps, sorted and added up one by one."""
    count = round(0.1 * losses.shape[1])
    for short, long in zip(range(len(losses)), range(1, len(losses)), strict=False):
        hardest = sorted(range(losses.shape[1]), key=lambda token: -losses[short, token])[:count]
        before = sum(losses[short, token] for token in hardest) / count
        after = sum(min(losses[short, token], losses[long, token]) for token in hardest) / count
        if (math.exp(before) - math.exp(after)) / math.exp(before) < 0.01:
            return short
    return len(losses) - 1


@pytest.mark.parametrize("step", [1, 2, 8])
def test_losses_are_those_of_every_context_read_alone(model: txl_runtime.Model, step: int) -> None:
    """Steps that divide a segment, and that hold several; the last runs end with the text."""
    ids = text(3 * step + 24 + 1)
    found = losses_by_context(model, ids, step, 4, Silent())
    expected = plain_losses(model, ids, step, 4)
    assert np.abs(found - expected).max() < 1e-5
    assert np.abs(expected[1:] - expected[:-1]).max() > 0.01  # context matters to this model


def test_the_rule_is_the_papers() -> None:
    draws = np.random.default_rng(0)
    for fading in (0.1, 0.5, 2.0):
        gains = np.exp(-np.arange(8) * fading)[:, None] * draws.random((8, 600))
        losses = 3 + gains + 0.05 * draws.random((8, 600))
        assert first_small(gains_of(losses)) == plain_rule(losses)
    assert first_small(np.full(7, 0.5)) == 7, "the longest one where every step gains"


@pytest.mark.parametrize(("back", "expected"), [(5, 8), (9, 8), (45, 48)])
def test_a_model_of_known_context_has_that_one(tmp_path: Path, back: int, expected: int) -> None:
    """The last token of the context that helps is `back` places away: contexts of more than c = `length` have it."""
    model = txl_runtime.load(copying(back).write(tmp_path / "copying.txl"), threads=1)
    losses = losses_by_context(model, repeating(1_273), 8, 10, Silent())
    assert first_small(gains_of(losses)) * 8 == expected
    for index, row in enumerate(losses):
        expected_loss = sum(loss(back, 8 * index + offset) for offset in range(1, 9)) / 8
        assert row.mean() == pytest.approx(expected_loss, abs=1e-6)


def test_whole_segments_in_lockstep(tmp_path: Path) -> None:
    model = txl_runtime.load(copying(11, lengths=(8,), exact=True).write(tmp_path / "copying.txl"), threads=1)
    assert lengths_of(model) == (8, 32)
    found = measure_context(model, repeating(1_500))
    assert (found.step, found.longest, found.length) == (8, 248, 16)
    assert (found.given, found.used, found.compared) == (1_500, 1_497, 1_248)
    assert len(found.gains) == 31


def test_a_text_that_is_too_short_says_how_long_it_has_to_be(model: txl_runtime.Model) -> None:
    found = measure_context(model, text(500))
    assert found == Missing("A text of 1,010 tokens or more is needed, this one has 500.")
    enough = measure_context(model, text(1_010))
    assert (enough.compared, enough.step) == (1_000, 1)
    assert isinstance(measure_context(model, []), Missing)


def test_models_that_have_no_context_to_measure(tmp_path: Path) -> None:
    found = measure_context(txl_runtime.load(recurrent().write(tmp_path / "recurrent"), threads=1), text(50))
    assert "takes token ids alone" in found.reason
    path = reseal(copying(3).write(tmp_path / "copying"), joint=True, streams="lockstep")
    found = measure_context(txl_runtime.load(path, threads=1), repeating(2_000))
    assert "influence one another" in found.reason
