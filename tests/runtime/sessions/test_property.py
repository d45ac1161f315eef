"""Sessions beside each other, at random: every result is that of the session alone on one stream.

TXL_SESSIONS_OPERATIONS and TXL_SESSIONS_SEEDS say how many operations each case does, and how many cases there are; a
short run is a part of the suite. TXL_SESSIONS_BUNDLE is a bundle in place of a small random one.
"""

from __future__ import annotations

import os

import pytest
from random_sessions import Game
from txl_runtime import load

OPERATIONS = int(os.environ.get("TXL_SESSIONS_OPERATIONS", "400"))
SEEDS = range(int(os.environ.get("TXL_SESSIONS_SEEDS", "1")))
CASES = [("ring", 3), ("rolled", 2), ("counting", 3)]


@pytest.fixture(scope="module")
def models(transformer, model_of):
    """The last one's memory is how often it has seen each token."""
    kept = {update: load(transformer, "cpu", 1, update=update) for update in ("ring", "rolled")}
    return kept | {"counting": model_of("counting")}


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("kind", "rows"), CASES)
def test_every_session_is_what_it_is_alone(models, tmp_path, kind, rows, seed):
    game = Game(models[kind], rows, tmp_path, seed)
    report = game.go(OPERATIONS)
    print(f"{kind}, {rows} rows, seed {seed}: {report}")
    assert report.requests["length"] > OPERATIONS // 10
    assert report.parked + game.sessions.counters.parked > OPERATIONS // 10
    assert report.ties <= 0.01 * report.tokens
    assert report.restarts
    assert report.expired
