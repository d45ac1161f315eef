"""Divergence, and where the best tokens stand: against sorting, for every width, with ties and what is no number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from txl_export.proof.comparing import ChainErrors, TensorErrors
from txl_export.proof.distributions import Distributions
from txl_export.proof.ranks import BEST, MANY, WITHIN, RankCounts
from txl_report.schema.verification import Chain, Ranks


def ranked(expected: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> RankCounts:
    ranks = RankCounts()
    ranks.add(expected.argmax(axis=1), expected, found)
    return ranks


def by_sorting(expected: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> tuple[dict[int, int], int]:
    best = min(BEST, expected.shape[1])
    orders = [np.argsort(-rows, axis=1, kind="stable") for rows in (expected, found)]
    places = [int(np.flatnonzero(ours == theirs[0])[0]) for theirs, ours in zip(*orders, strict=True)]
    shared = sum(len({*theirs[:best]} & {*ours[:best]}) for theirs, ours in zip(*orders, strict=True))
    return {number: sum(place < number for place in places) for number in WITHIN}, shared


@pytest.mark.parametrize("width", [1, 2, 9, 10, 11, 60, 300, MANY - 1, MANY, MANY + 63, MANY + 64])
@pytest.mark.parametrize("noise", [0.0, 1e-3, 1.0, 10.0])
def test_ranks_are_those_of_sorting(width: int, noise: float):
    draws = np.random.default_rng(width)
    expected = draws.normal(size=(7, width))
    found = (expected + noise * draws.normal(size=expected.shape)).astype(np.float32)
    ranks = ranked(expected, found)
    within, shared = by_sorting(expected.astype(np.float32), found)
    assert (ranks.positions, ranks.best) == (7, min(BEST, width))
    assert (ranks.within, ranks.shared) == (within, shared)
    if not noise:
        assert set(ranks.within.values()) == {7}
        assert ranks.shared == 7 * ranks.best


@pytest.mark.parametrize("width", [MANY, MANY + 63])
def test_the_best_may_stand_behind_the_last_whole_block(width: int):
    rising = np.linspace(-9, -1, width)[None]
    falling = np.concatenate([rising[:, : width - 10], -20 - rising[:, width - 10 :]], axis=1)
    assert ranked(rising, falling.astype(np.float32)).shared == by_sorting(rising, falling)[1] == 0


def test_equal_values_do_not_stand_before_one_another_and_count_once():
    ranks = ranked(np.zeros((3, 50)), np.zeros((3, 50), np.float32))
    assert ranks.within == dict.fromkeys(WITHIN, 3)
    assert ranks.shared == 3 * BEST


@pytest.mark.parametrize("width", [5, 50, MANY])
@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_values_that_are_no_numbers_agree_with_nothing(width: int, value: float):
    expected = np.log(np.random.default_rng(0).dirichlet(np.ones(width), 4))
    found = expected.astype(np.float32)
    found[0] = value
    found[1, expected[1].argmin()] = np.nan  # one column alone counts as better than the best
    ranks = ranked(expected, found)
    assert ranks.within[1] == 2 + (not np.isnan(value))  # where all are equal none stands before the best
    assert ranks.within[2] == 3 + (not np.isnan(value))


def test_counts_add_up():
    draws = np.random.default_rng(3)
    expected, found = draws.normal(size=(2, 40, 30))
    whole = ranked(expected, found)
    assert ranked(expected[:11], found[:11]).joined(ranked(expected[11:], found[11:])) == whole
    assert RankCounts().summary() is None
    within = {str(number): count for number, count in whole.within.items()}
    assert whole.summary() == Ranks(positions=40, within=within, best=BEST, shared=whole.shared)


def test_what_compares_distributions_counts_ranks_of_every_position():
    chain = ChainErrors(Chain(name="a", streams=1, segments=0, positions=0))
    rows = np.log(np.random.default_rng(0).dirichlet(np.ones(30_000), 9))
    Distributions(chain, TensorErrors(nats=True), rows.shape[1]).compare(rows, rows.astype(np.float32))
    assert (chain.ranks.positions, chain.ranks.within[1], chain.ranks.shared) == (9, 9, 90)
    assert chain.chain.agreeing == chain.chain.decided


@pytest.mark.parametrize("spread", [0.0, 1e-2, 1.0])
def test_log_probabilities_in_float32_do_not_diverge_from_themselves(spread: float):
    logits = np.random.default_rng(0).normal(size=(6, 16_000)) * spread
    values = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)
    chain = ChainErrors(Chain(name="", streams=1, segments=0, positions=0))
    Distributions(chain, TensorErrors(nats=True), 16_000).compare(values, values)
    assert np.abs(chain.kl).max() < 1e-13
