"""The effective context of a constructed model is found; losses and the rule are those of plain loops."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import txl_runtime
from copying import copying, loss, repeating
from frozen import frozen
from step_models import recurrent
from txl_report.facts.plain import Missing
from txl_report.measuring import measure_context
from txl_report.measuring.effective import effective_contexts
from txl_report.measuring.runs import Plan, contexts_of
from txl_runtime import UsageError
from txl_runtime.listener import Silent


@pytest.fixture
def model() -> txl_runtime.Model:
    return txl_runtime.load(frozen("clusters"), threads=1)


def text(tokens: int, vocab_size: int = 256) -> np.ndarray:
    return np.random.default_rng(1).integers(0, vocab_size, tokens).astype(np.int32)


def plain_losses(model: txl_runtime.Model, ids: np.ndarray, plan: Plan) -> np.ndarray:
    """Every token's loss with every context, each from a fresh stream that reads that context alone."""
    length, step = model.segment_lengths[0], plan.step
    losses = np.zeros((plan.lengths, plan.blocks * step))
    for column in range(plan.blocks * step):
        target = (plan.lengths - 1) * step + column + 1
        for index in range(plan.lengths):
            start = (target - 1) // step * step - index * step
            stream, first = model.stream(1), start
            while first < target:
                last = min((first // length + 1) * length, target)
                found = stream.step(ids[None, first:last])[0, -1]
                first = last
            losses[index, column] = -found[ids[target]]
    return losses


def plain_rule(losses: np.ndarray, step: int, share: float) -> tuple[int, int]:
    """The effective context and the plain one, sorted and added up one by one."""
    count = round(share * losses.shape[1])
    lengths = []
    for smaller in (True, False):
        for short, long in zip(range(len(losses)), range(1, len(losses)), strict=False):
            hardest = sorted(range(losses.shape[1]), key=lambda token: -losses[short, token])[:count]
            before = sum(losses[short, token] for token in hardest) / count
            pairs = [(losses[short, token], losses[long, token]) for token in hardest]
            after = sum(min(pair) if smaller else pair[1] for pair in pairs) / count
            if (math.exp(before) - math.exp(after)) / math.exp(before) < 0.01:
                lengths.append(short * step)
                break
        else:
            lengths.append((len(losses) - 1) * step)
    return lengths[0], lengths[1]


@pytest.mark.parametrize("step", [2, 3, 8])
def test_losses_are_those_of_every_context_read_alone(model: txl_runtime.Model, step: int) -> None:
    """Steps that divide a segment, that do not, and that hold several; a text that ends within a run."""
    ids, plan = text(100), Plan(step, 4, 24 // step)
    found = contexts_of(model, ids, plan, Silent())
    expected = plain_losses(model, ids, plan)
    assert np.abs(found - expected).max() < 1e-5
    assert np.abs(expected[1:] - expected[:-1]).max() > 0.01  # context matters to this model


def test_the_rule_is_the_papers() -> None:
    draws = np.random.default_rng(0)
    for fading in (0.1, 0.5, 2.0):
        gains = np.exp(-np.arange(8) * fading)[:, None] * draws.random((8, 600))
        losses = 3 + gains + 0.05 * draws.random((8, 600))
        for found in effective_contexts(losses, 5):
            assert (found.length, found.plain_length) == plain_rule(losses, 5, found.share)
            assert found.count == round(found.share * 600)
            assert found.low <= found.length <= found.high
            assert found.at_least == (found.length == 35)


@pytest.mark.parametrize(("back", "expected"), [(5, 8), (9, 8), (45, 48)])
def test_a_model_of_known_context_has_that_one(tmp_path: Path, back: int, expected: int) -> None:
    """The last token of the context that helps is `back` places away: contexts of more than c = `length` have it."""
    model = txl_runtime.load(copying(back).write(tmp_path / "copying.txl"), threads=1)
    found = measure_context(model, repeating(2_000), step=8, longest=80, most=1_200)
    assert (found.compared, found.longest) == (1_200, 72)
    assert found.lengths is not None
    assert found.losses is not None
    for length in found.lengths:
        assert (length.length, length.plain_length, length.at_least) == (expected, expected, False)
        assert length.low == length.high == expected
    for entry in found.losses:
        expected_loss = sum(loss(back, entry.context + offset) for offset in range(1, 9)) / 8
        assert entry.loss.nll == pytest.approx(expected_loss, abs=1e-6)


def test_whole_segments_in_lockstep(tmp_path: Path) -> None:
    model = txl_runtime.load(copying(11, lengths=(8,), exact=True).write(tmp_path / "copying.txl"), threads=1)
    found = measure_context(model, repeating(1_500), longest=48)
    assert found.lengths is not None
    assert (found.step, [length.length for length in found.lengths]) == (8, [16, 16, 16])
    with pytest.raises(UsageError, match="multiples of 8"):
        measure_context(model, repeating(1_500), step=4)


def test_a_text_that_is_too_short_says_how_long_it_has_to_be(model: txl_runtime.Model) -> None:
    found = measure_context(model, text(500))
    assert found == Missing("A text of 1,010 tokens or more is needed, this one has 500.")
    enough = measure_context(model, text(1_010), most=0)
    assert (enough.compared, enough.step) == (1_000, 1)
    assert isinstance(measure_context(model, []), Missing)


def test_models_that_have_no_context_to_measure(tmp_path: Path) -> None:
    found = measure_context(txl_runtime.load(recurrent().write(tmp_path / "recurrent"), threads=1), text(50))
    assert "takes token ids alone" in found.reason
    path = copying(3).write(tmp_path / "copying")
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"joint": True, "streams": "lockstep"}))
    found = measure_context(txl_runtime.load(path, threads=1), repeating(2_000))
    assert "influence one another" in found.reason
