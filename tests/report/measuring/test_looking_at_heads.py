"""What heads look at is what plain loops add up; pictures stay within their bounds."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import txl_runtime
from frozen import frozen
from step_models import counting
from txl_report.facts.plain import Missing
from txl_report.measuring import look_at_heads

L, M, LAYERS, HEADS = 4, 7, 2, 2


@pytest.fixture
def model() -> txl_runtime.Model:
    return txl_runtime.load(frozen("0.8/tokens"), threads=1)


def text(tokens: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 41, tokens).astype(np.int32)


def test_heads_are_averaged_as_plain_loops_do(model: txl_runtime.Model) -> None:
    ids = text(55)
    found = look_at_heads(model, ids)
    assert (found.segments, found.queries) == (11, 44)
    assert (found.layers, found.heads, found.memory_length) == (LAYERS, HEADS, M)
    assert [(one.first, one.last) for one in found.distance_bins] == [(0, 0), (1, 1), (2, 3), (4, 7), (8, 10)]
    stream = model.stream(1)
    stream.feed(ids[None, :8])
    sums = {(layer, head): [0.0] * 4 for layer in range(LAYERS) for head in range(HEADS)}
    shares, by_distance = np.zeros((LAYERS, HEADS, 5)), np.zeros((LAYERS, HEADS, M + L))
    for first in range(8, 52, 4):
        looked = stream.attention(ids[None, first : first + 4])
        stream.step(ids[None, first : first + 4])
        for layer, _, head, query, slot in np.ndindex(looked.shape):
            share, distance = float(looked[layer, 0, head, query, slot]), M + query - slot
            if share:
                values = (distance, slot < M, distance >= L, -math.log(share))
                for index, value in enumerate(values):
                    sums[layer, head][index] += share * value / 44
                by_distance[layer, head, distance] += share / 44
                shares[layer, head, [0, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4][distance]] += share / 44
    for one in found.facts:
        expected = sums[one.layer, one.head]
        assert [one.distance, one.memory_share, one.beyond_share, one.entropy] == pytest.approx(expected, abs=1e-5)
        assert one.looks_at == pytest.approx(math.exp(expected[3]), rel=1e-4)
        assert one.error is not None
        within = [by_distance[one.layer, one.head, : reach + 1].sum() >= 0.9 for reach in range(M + L)]
        assert one.reach == within.index(True)
    assert [one.distance for one in found.facts] == sorted(one.distance for one in found.facts)
    assert np.abs(found.distance_shares - shares).max() < 1e-5
    assert found.beyond == sum(one.beyond_share > 0.1 for one in found.facts)
    assert found.mean_beyond == sum(one.distance >= L for one in found.facts)


def test_what_is_missing_is_said(model: txl_runtime.Model, tmp_path: Path) -> None:
    short = look_at_heads(model, text(11))
    assert isinstance(short, Missing)
    assert short.reason.startswith("The memory and a segment need a text of at least 12 tokens, this one has 11")
    assert look_at_heads(model, text(12)).segments == 1
    without = txl_runtime.load(counting().write(tmp_path / "counting.txl"), threads=1)
    assert "--attention" in look_at_heads(without, [1, 2, 3]).reason
