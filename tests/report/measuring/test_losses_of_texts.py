"""Losses on a text are those of a plain loop of steps; what cannot be measured is said in a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import txl_runtime
from copying import copying, loss, repeating
from frozen import frozen
from resealing import reseal
from step_models import VOCABULARY, counting, growing, recurrent
from txl_report.facts.plain import Missing
from txl_report.measuring import measure_text
from txl_report.measuring.text import most_tokens
from txl_report.measuring.texts import LARGE
from txl_runtime import UsageError
from txl_runtime.bundle.vocabulary import Words
from txl_runtime.listener import Listener

L, M = 4, 6
WARM_UP = 8
"""Tokens: two segments hold six rows."""


@pytest.fixture
def model() -> txl_runtime.Model:
    return txl_runtime.load(frozen("clusters"), threads=1)


def text(tokens: int, vocab_size: int = 256) -> np.ndarray:
    return np.random.default_rng(1).integers(0, vocab_size, tokens).astype(np.int32)


def plain(model: txl_runtime.Model, ids: np.ndarray, rows: int | None) -> np.ndarray:
    """Losses of ids[1:], read alone, one segment of L after the other."""
    stream = model.stream(1, memory_length=rows)
    losses = []
    for first in range(0, len(ids) - L, L):
        found = stream.step(ids[None, first : first + L])[0]
        losses += [-float(found[place, ids[first + place + 1]]) for place in range(L)]
    return np.array(losses)


def pieces(model: txl_runtime.Model, ids: np.ndarray, rows: int | None) -> np.ndarray:
    """Losses that count, [2, tokens], of a text that is cut in two."""
    half = (len(ids) - 1) // L // 2 * L
    parts = [ids[: half + 1], ids[half : 2 * half + 1]]
    return np.stack([plain(model, part, rows)[WARM_UP:] for part in parts])


def test_losses_are_those_of_a_plain_loop(model: txl_runtime.Model) -> None:
    ids = text(203)
    found = measure_text(model, ids)
    whole = pieces(model, ids, None)
    assert (found.given, found.used, found.warm_up, found.sequences) == (203, 201, WARM_UP, 2)
    assert (found.segment_length, found.memory_length, found.reason) == (L, M, "")
    assert found.loss is not None
    assert found.loss.count == whole.size == 184
    assert found.loss.nll == pytest.approx(whole.mean(), abs=1e-6)
    assert found.loss.perplexity == pytest.approx(math.exp(whole.mean()), rel=1e-6)
    assert found.by_position is not None
    for place, entry in enumerate(found.by_position):
        assert (entry.first, entry.last, entry.loss.count) == (place, place, 46)
        assert entry.loss.nll == pytest.approx(whole[:, place::L].mean(), abs=1e-6)
        assert entry.without is not None
        assert entry.without.nll == pytest.approx(pieces(model, ids, 0)[:, place::L].mean(), abs=1e-6)
    assert found.of_bytes
    assert found.by_memory is not None
    assert [entry.rows for entry in found.by_memory] == [0, 1, 3, 6]
    for entry in found.by_memory:
        capped = pieces(model, ids, entry.rows)
        assert entry.loss.nll == pytest.approx(capped.mean(), abs=1e-6)
        assert entry.more == pytest.approx((capped - whole).mean(), abs=1e-6)
    assert found.by_memory[0].more != 0


def test_gains_are_losses_without_memory_less_losses_with_it(
    model: txl_runtime.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txl_report.measuring.gains.PASSAGE", 10)
    ids = text(203)
    found = measure_text(model, ids)
    whole, without = pieces(model, ids, None), pieces(model, ids, 0)
    gains = (without - whole).ravel()
    assert found.passage is not None
    windows = [(gains[first : first + 10].sum(), first) for first in range(83) for first in (first, first + 92)]
    best = max(windows)[1]  # the ten tokens in a row that gained most, which lie in one of the two pieces
    assert [token.place for token in found.passage] == [WARM_UP + 1 + best + 8 * (best >= 92) + at for at in range(10)]
    for index, token in enumerate(found.passage, best):
        assert token.token == ids[token.place]
        assert token.text == bytes([token.token]).decode(errors="surrogateescape")
        assert token.with_memory == pytest.approx(whole.flat[index], abs=1e-5)
        assert token.gain == pytest.approx(gains[index], abs=1e-5)
    gain = found.gain
    assert gain is not None
    assert (gain.count, gain.share_gained) == (gains.size, (gains > 0).mean())
    assert gain.mean == pytest.approx(gains.mean(), abs=1e-6)
    assert gain.doubled == (gains >= math.log(2)).mean()


def test_errors_come_from_blocks_of_the_text(model: txl_runtime.Model) -> None:
    ids = text(2 * 12 * 64 + 2 * WARM_UP + 1)
    found = measure_text(model, ids)
    means = pieces(model, ids, None).reshape(24, 64).mean(axis=1)
    assert found.loss is not None
    assert found.loss.error == pytest.approx(means.std(ddof=1) / math.sqrt(24), rel=1e-5)


def test_long_segments_have_positions_in_bins(tmp_path: Path) -> None:
    model = txl_runtime.load(counting(lengths=(150,)).write(tmp_path / "counting.txl"), threads=1)
    found = measure_text(model, text(901, VOCABULARY))
    assert found.by_position is not None
    assert [(entry.first, entry.last) for entry in found.by_position] == [
        (first, first + 2) for first in range(0, 150, 3)
    ]
    assert {entry.loss.count for entry in found.by_position} == {18}


def test_tokens_without_a_vocabulary_have_no_text(model: txl_runtime.Model) -> None:
    model.__dict__["vocabulary"] = None
    ids = text(203)
    found = measure_text(model, ids)
    assert found.passage is not None
    assert found.passage[0].text is None


def test_no_more_tokens_than_asked_for(model: txl_runtime.Model) -> None:
    assert measure_text(model, text(4_001), most=500).used == 2 * 4 * 62 + 1


@pytest.mark.parametrize(
    ("parameters", "length", "rows", "joint", "used"),
    [
        (LARGE, 512, 128, False, 16_385),
        (LARGE + 1, 512, 128, False, 4_097 + 512),  # one segment fills the memory, eight are read after it
        (LARGE + 1, 64, 128, False, 4_097),
        (LARGE, 512, 16_000, False, 40 * 512 + 1),
        (LARGE, 64, 8_192, True, 3 * 136 * 64 + 1),
    ],
)
def test_how_many_tokens_count_follows_from_the_sizes_alone(
    parameters: int, length: int, rows: int, joint: bool, used: int
) -> None:
    """16,384 tokens, a quarter of a large model's, and never fewer than eight segments with the memory full."""
    manifest = SimpleNamespace(parameters=parameters, can=SimpleNamespace(run_fewer=not joint))
    sizes = SimpleNamespace(manifest=manifest, segment_lengths=(length, 1), memory_length=rows, batch_size=3)
    assert most_tokens(sizes) == used


def test_a_text_that_does_not_fill_the_memory_says_how_long_it_has_to_be(model: txl_runtime.Model) -> None:
    found = measure_text(model, text(12))
    assert found.loss is not None
    assert found.loss.count == 8
    assert found.by_memory is found.passage is found.gain is None
    assert found.reason == "The text is too short for a memory of 6 rows; give one of at least 13 tokens."
    assert measure_text(model, text(13)).by_memory is not None
    assert measure_text(model, text(3)).loss is not None  # less than a segment
    for tokens in range(2, 13):
        assert "at least 13 tokens" in measure_text(model, text(tokens)).reason
    for tokens in (0, 1):
        assert "needs a text of at least 2 tokens" in measure_text(model, text(tokens)).reason
    assert measure_text(model, text(2)).loss is not None


def test_tokens_that_stand_for_unknown_words_are_told(model: txl_runtime.Model) -> None:
    ids = text(60)
    ids[::7] = 9
    symbols = tuple(f"w{index}" for index in range(256))
    vars(model)["vocabulary"] = Words(symbols=symbols, unknown=9, delimiter=" ")
    found = measure_text(model, ids)
    assert found.loss is not None
    size = (found.used - 1) // found.sequences
    places = [range(first + WARM_UP + 1, first + size + 1) for first in range(0, found.used - 1, size)]
    expected = sum(int(ids[place] == 9) for each in places for place in each)
    assert expected > 3
    (note,) = (note for note in found.notes if "unknown" in note)
    assert note.startswith(f"{expected} of the {found.loss.count} tokens that count are")
    vars(model)["vocabulary"] = Words(symbols=symbols, unknown=None, delimiter=" ")
    assert not any("unknown" in note for note in measure_text(model, ids).notes)


def test_models_that_count_no_memory_rows(tmp_path: Path) -> None:
    model = txl_runtime.load(counting().write(tmp_path / "counting.txl"), threads=1)
    found = measure_text(model, text(301, VOCABULARY))
    assert found.loss is not None
    assert (found.loss.count, found.memory_length, found.warm_up) == (300, None, 0)
    assert found.by_memory is None
    assert found.reason.startswith("This model counts no memory rows (it carries seen)")


def test_lockstep_and_whole_segments(tmp_path: Path) -> None:
    model = txl_runtime.load(copying(3, lengths=(8,), exact=True).write(tmp_path / "copying.txl"), threads=1)
    found = measure_text(model, repeating(245))
    assert found.loss is not None
    assert (found.sequences, found.loss.count) == (3, 240)
    assert found.loss.nll == pytest.approx(sum(loss(3, context) for context in range(1, 81)) / 80, abs=1e-6)


def test_a_memory_of_no_rows(make_bundle: Callable[..., Path]) -> None:
    model = txl_runtime.load(make_bundle(batch_size=3, config={"memory_length": 0}), threads=1)
    found = measure_text(model, text(41, model.manifest.vocab_size))
    assert found.reason.startswith("This model has no memory")


def test_models_without_losses(tmp_path: Path) -> None:
    for name, made in {"recurrent": recurrent(), "growing": growing()}.items():
        found = measure_text(txl_runtime.load(made.write(tmp_path / name), threads=1), [1, 2, 3] * 9)
        assert isinstance(found, Missing)
        assert "expected" in found.reason or "takes token ids alone" in found.reason


def test_sequences_that_influence_one_another_are_told(tmp_path: Path) -> None:
    path = reseal(copying(3).write(tmp_path / "copying.txl"), joint=True, streams="lockstep")
    model = txl_runtime.load(path, threads=1)
    found = measure_text(model, repeating(49))
    assert found.sequences == 3
    assert "influence one another" in found.notes[0]
    assert "at least 25" in measure_text(model, repeating(20)).reason


def test_progress_and_bad_ids(model: txl_runtime.Model) -> None:
    class Heard(Listener):
        total, steps = 0, 0

        def stage(self, title: str, total: int | None = None) -> None:
            self.total = total or 0

        def advance(self, steps: int = 1) -> None:
            self.steps += steps

    heard = Heard()
    measure_text(model, text(201), heard)
    assert heard.total == heard.steps == 25
    for bad in ([[1, 2]], [0.5], [1, 256], [-1, 3]):
        with pytest.raises(UsageError, match="expected"):
            measure_text(model, bad)
