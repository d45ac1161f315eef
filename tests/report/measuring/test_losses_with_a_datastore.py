"""Losses with and without a datastore: those of the stream, grouped by how often the store has read the token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frozen import frozen
from txl_report.measuring import Searched, measure_datastore
from txl_report.sections.datastore import datastore_section
from txl_runtime import Model, UsageError, load


class Sevens:
    """A store that foretells token 7."""

    def shares(self, features: np.ndarray, entropies: Any) -> tuple[np.ndarray, np.ndarray]:
        return np.full((len(features), 1), 7), np.full((len(features), 1), 0.5)


@pytest.fixture(scope="module")
def model() -> Model:
    return load(frozen("clusters"), "cpu", threads=1)


@pytest.fixture
def searched() -> Searched:
    seen = np.zeros(256, np.int64)
    seen[[7, 8, 9]] = 100, 9, 10
    return Searched("sevens.store", Sevens(), seen)


def test_losses_are_those_of_the_stream_by_frequency(model: Model, searched: Searched) -> None:
    ids = np.random.default_rng(0).choice([7, 8, 9, 10], size=600).astype(np.int32)
    found = measure_datastore(model, ids, searched)
    alone = model.stream(1).score(ids[None])[0].astype(np.float64)
    mixed = -np.log(0.5 * (ids[1:] == 7) + 0.5 * np.exp(-alone))
    assert found.without.nll == pytest.approx(alone.mean())
    assert found.mixed.nll == pytest.approx(mixed.mean(), abs=1e-6)
    groups = [(each.first, each.last, each.without.count, each.mixed.nll) for each in found.by_frequency]
    expected = [(0, 0, 10), (1, 9, 8), (10, 99, 9), (100, 999, 7)]
    assert groups == [
        (first, last, (ids[1:] == token).sum(), pytest.approx(mixed[ids[1:] == token].mean(), abs=1e-6))
        for first, last, token in expected
    ]
    shown = str(datastore_section(found).blocks)
    for said in ("sevens.store, 119 positions", "read never, with", "read 100 … 999 times, without"):
        assert said in shown


def test_a_text_of_one_token_has_no_loss(model: Model, searched: Searched) -> None:
    with pytest.raises(UsageError, match="needs a text of at least 2 tokens, this one has 1"):
        measure_datastore(model, [7], searched)
