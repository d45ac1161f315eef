"""A limit on memory rows: the function of a model with so short a memory, whatever is done to the stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frozen import KEPT, opened
from step_models import counting
from txl_runtime import Stream, UsageError, load
from txl_runtime.streaming.state import RowState

M, K = 6, 3
kinds = pytest.mark.parametrize("kind", KEPT)


def tokens(columns: int, seed: int, rows: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 41, (rows, columns)).astype(np.int32)


def segments(b: int, count: int = 30) -> Any:
    """Segments of every length, filled in part, with sequences that are idle: memories of 6 and of 3 roll over."""
    draws = np.random.default_rng(5)
    for seed in range(count):
        columns = int(draws.integers(1, 5))
        lengths = draws.integers(0, columns + 1, b)
        yield tokens(columns, seed, b), lengths if seed % 3 else np.full(b, columns)


def cut(stream: Stream, most: int) -> None:
    """Leave each sequence its newest rows, as a caller can do by hand."""
    for row in range(stream.batch_size):
        state = stream.take(row)
        fill = min(state.fill, most)
        newest = {name: rows[len(rows) - fill :] for name, rows in state.tensors.items()}
        stream.put(row, RowState(fill, state.head, newest))


@kinds
def test_it_cuts_as_a_hand_that_cuts_the_state_before_each_segment(kind):
    limited, by_hand = opened(kind).stream(memory_length=K), opened(kind).stream()
    for ids, lengths in segments(by_hand.batch_size):
        cut(by_hand, K)
        assert limited.step(ids, lengths).tobytes() == by_hand.step(ids, lengths).tobytes()
    cut(by_hand, K)
    assert limited.fill.tolist() == [K] * by_hand.batch_size, "the memory was full"
    for name, rows in by_hand.memory().items():
        assert limited.memory()[name].tobytes() == rows.tobytes()


@kinds
def test_it_holds_whatever_is_done_to_the_state(kind):
    model = opened(kind)
    b = model.batch_size
    limited, fresh, full, wide = (model.stream(memory_length=rows) for rows in (K, K, None, None))
    start = fresh.fill.tolist()
    full.feed(tokens(20, 1, b))
    assert full.fill.tolist() == [M] * b
    whole = full.snapshot()
    limited.restore(whole)
    cut(full, K)
    for name, rows in full.memory().items():
        assert limited.memory()[name].tobytes() == rows.tobytes()
    assert limited.step(tokens(4, 2, b)).tobytes() == full.step(tokens(4, 2, b)).tobytes()
    full.restore(whole)
    limited.put(1, full.take(0))
    assert limited.fill.tolist() == [K] * b
    limited.select([1, 1])
    assert limited.fill.tolist() == [K, K]
    limited.reset([0])
    assert limited.fill.tolist() == [start[0], K]
    limited.reset()
    limited.select([0, 1, 0][:b])
    assert limited.feed(tokens(11, 3, b)).tobytes() == fresh.feed(tokens(11, 3, b)).tobytes()
    kept = limited.snapshot()
    assert max(kept.fill.tolist()) == K
    wide.restore(kept)
    wide.feed(tokens(2, 4, b))
    assert wide.fill.tolist() == [K + 2] * b, "a state that was cut goes on in a stream without a limit"


@pytest.mark.parametrize("kind", ["ring", "rolled", "zeros"])
def test_the_limit_of_a_row_is_for_whoever_stands_there(kind):
    stream = opened(kind).stream()
    fresh = stream.fill.tolist()
    stream.feed(tokens(20, 1))
    stream.loop.limit(np.array([1]), 2)
    assert stream.fill.tolist() == [M, 2, M]
    stream.select([1, 0, 2])
    assert stream.fill.tolist() == [2, 2, M]
    stream.feed(tokens(3, 2))
    assert stream.fill.tolist() == [5, 2, M]
    stream.put(1, stream.take(2))
    assert stream.fill.tolist() == [5, 2, M]
    stream.loop.limit(np.array([1]), M)
    assert stream.fill.tolist() == [5, 2, M], "what is gone does not come back"
    stream.loop.limit(np.array([1]), 2)
    stream.reset()
    assert stream.fill.tolist() == [min(start, most) for start, most in zip(fresh, [M, 2, M], strict=True)]


@pytest.mark.parametrize("kind", ["ring", "rolled"])
def test_scores_and_draws_see_as_little(kind):
    limited, by_hand, text = opened(kind).stream(1, memory_length=K), opened(kind).stream(1), tokens(14, 1, 1)
    rows = []
    for first in range(0, 13, 4):
        cut(by_hand, K)
        rows.append(by_hand.step(text[:, first : min(first + 4, 13)])[0])
    expected = -np.concatenate(rows)[np.arange(13), text[0, 1:]]
    np.testing.assert_allclose(limited.score(text)[0], expected, rtol=0, atol=2e-6)
    limited.reset()
    drawn = np.concatenate([*limited.generate(text, 12, temperature=0)])
    by_hand.reset()
    for first in (0, 4, 8, 12):
        cut(by_hand, K)
        row = by_hand.step(text[:, first : first + 4])[0, -1]
    for token in drawn:
        assert token == row.argmax()
        cut(by_hand, K)
        row = by_hand.step(np.array([[token]]))[0, 0]
    assert len(drawn) == 12


@pytest.mark.parametrize("kind", ["ring", "rolled"])
def test_idle_sequences_behind_the_last_one_that_runs_keep_their_limit(kind):
    limited, by_hand = opened(kind).stream(memory_length=K), opened(kind).stream()
    for seed, lengths in enumerate(([4, 4, 4], [4, 0, 0], [3, 0, 0], [2, 4, 0], [4, 4, 4], [0, 0, 1], [1, 1, 1])):
        cut(by_hand, K)
        assert limited.step(tokens(4, seed), lengths).tobytes() == by_hand.step(tokens(4, seed), lengths).tobytes()


def test_all_rows_are_no_limit_and_what_is_none_is_refused(tmp_path):
    model = opened("ring")
    limited, plain = model.stream(memory_length=M), model.stream()
    assert limited.feed(tokens(23, 1)).tobytes() == plain.feed(tokens(23, 1)).tobytes()
    for wrong in (-1, M + 1, 2.0, True, "3", [3], 2**70):
        with pytest.raises(UsageError, match=rf"memory_length is .*, expected 0 … {M}; export with --memory-length"):
            model.stream(memory_length=wrong)
    step = load(counting().write(tmp_path / "step.txl"), backend="cpu", threads=1)
    with pytest.raises(UsageError, match="memory_length is 2, but this model counts no memory rows; leave it out"):
        step.stream(memory_length=2)
