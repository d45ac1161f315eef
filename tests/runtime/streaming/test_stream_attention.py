"""A look from a stream: it changes nothing, sees what the stream remembers, and refuses what is no segment."""

from __future__ import annotations

import numpy as np
import pytest
from frozen import frozen
from txl_runtime import UsageError, load

B, M, L = 3, 7, 4


@pytest.mark.parametrize("update", ["ring", "rolled"])
def test_a_look_changes_no_bit_and_sees_the_memory_rows_and_then_the_segment(update):
    model = load(frozen("0.8/tokens"), "cpu", update=update)
    looking, alone, draws = model.stream(), model.stream(), np.random.default_rng(3)
    for _ in range(5):
        tokens, counts, fill = draws.integers(0, 41, (B, L)), draws.integers(0, L + 1, B), looking.fill
        seen = looking.attention(tokens)
        assert seen.shape == (2, B, 2, L, M + L)
        for row, rows in enumerate(fill.tolist()):
            assert not seen[:, row, ..., : M - rows].any()
            assert (seen[:, row, ..., M - rows : M] > 0).all()
        assert not looking.attention(tokens, [0, 0, 0]).any()
        assert np.array_equal(looking.attention(tokens, [0, L, 0])[:, 1], seen[:, 1]), "every sequence looks alone"
        assert np.array_equal(looking.step(tokens, counts), alone.step(tokens, counts))
    assert all(np.array_equal(rows, alone.memory()[name]) for name, rows in looking.memory().items())


def test_what_is_no_segment_and_a_bundle_without_the_program_are_refused():
    stream = load(frozen("0.8/tokens"), "cpu").stream()
    with pytest.raises(UsageError, match=r"tokens have 5 columns, expected at most one segment of 4; feed what comes"):
        stream.attention(np.zeros((B, L + 1), int))
    stream._half_changed = True
    with pytest.raises(UsageError, match="left half replaced"):
        stream.attention(np.zeros((B, 1), np.int32))
    with pytest.raises(UsageError, match=r"which this bundle lacks; export the model again with --attention"):
        load(frozen("ring"), "cpu").stream().attention([[1]])
