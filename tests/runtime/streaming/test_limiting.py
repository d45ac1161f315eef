"""A limit on memory rows: the function of a model with so short a memory, whatever is done to the stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from step_models import counting
from txl_runtime import Model, Stream, UsageError, load
from txl_runtime.streaming.state import RowState

B, V, M, K = 3, 60, 7, 3
TOLERANCE = 2e-6  # relative, or absolute below 1
KINDS: dict[str, dict[str, Any]] = {
    "ring": {},
    "rolled": {"update": "rolled"},
    "hidden": {"memory": "hidden", "update": "rolled"},
    "zeros": {"config": {"memory_start": "zeros", "pre_lnorm": True, "attention_bias": True}},
    "zeros, rolled": {
        "config": {"memory_start": "zeros", "pre_lnorm": True, "attention_bias": True},
        "update": "rolled",
    },
}
SLOW = ("hidden", "zeros", "zeros, rolled")
kinds = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else ()) for kind in KINDS]
)


@pytest.fixture
def opened(make_bundle) -> Callable[..., Model]:
    """The model of a kind, exported with a memory of so many rows."""

    def open_kind(kind: str, rows: int = M) -> Model:
        options = dict(KINDS[kind])
        update = options.pop("update", None)
        config = options.pop("config", {}) | ({} if rows == M else {"memory_length": rows})
        path = make_bundle(batch_size=B, config=config, **options, **({} if rows == M else {"verify": False}))
        return load(path, "cpu", threads=1, update=update)

    return open_kind


def tokens(columns: int, seed: int, rows: int = B) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, (rows, columns)).astype(np.int32)


def segments(count: int = 30) -> Any:
    """Segments of every length, filled in part, with sequences that are idle: memories of 7 and of 3 roll over."""
    draws = np.random.default_rng(5)
    for seed in range(count):
        columns = int(draws.integers(1, 5))
        lengths = draws.integers(0, columns + 1, B)
        yield tokens(columns, seed), lengths if seed % 3 else np.full(B, columns)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * max(1.0, float(np.abs(expected).max())))


def cut(stream: Stream, most: int) -> None:
    """Leave each sequence its newest rows, as a caller can do by hand."""
    for row in range(stream.batch_size):
        state = stream.take(row)
        fill = min(state.fill, most)
        newest = {name: rows[len(rows) - fill :] for name, rows in state.tensors.items()}
        stream.put(row, RowState(fill, state.head, newest))


@kinds
def test_it_is_the_function_of_a_shorter_memory(opened, kind: str) -> None:
    limited, short = opened(kind).stream(memory_length=K), opened(kind, K).stream()
    assert limited.fill.tolist() == short.fill.tolist()
    for ids, lengths in segments():
        assert_close(limited.step(ids, lengths), short.step(ids, lengths))
        assert limited.fill.tolist() == short.fill.tolist()
    assert limited.fill.tolist() == [K] * B, "the memory was full"
    for name, rows in short.memory().items():
        assert_close(limited.memory()[name], rows)


@kinds
def test_it_cuts_as_a_hand_that_cuts_the_state_before_each_segment(opened, kind: str) -> None:
    model = opened(kind)
    limited, by_hand = model.stream(memory_length=K), model.stream()
    for ids, lengths in segments():
        cut(by_hand, K)
        assert limited.step(ids, lengths).tobytes() == by_hand.step(ids, lengths).tobytes()
    cut(by_hand, K)
    for name, rows in by_hand.memory().items():
        assert limited.memory()[name].tobytes() == rows.tobytes()


@pytest.mark.parametrize("kind", ["ring", "rolled"])
def test_no_row_is_a_reset_before_each_segment(opened, kind: str) -> None:
    model = opened(kind)
    limited, fresh = model.stream(memory_length=0), model.stream()
    for ids, lengths in segments(12):
        fresh.reset()
        assert_close(limited.step(ids, lengths), fresh.step(ids, lengths))
        assert limited.fill.tolist() == [0] * B
    assert all(rows.shape[1] == 0 for rows in limited.memory().values())


@kinds
def test_it_holds_whatever_is_done_to_the_state(opened, kind: str) -> None:
    model = opened(kind)
    limited, short, full = model.stream(memory_length=K), opened(kind, K).stream(), model.stream()
    start = short.fill.tolist()
    full.feed(tokens(20, 1))
    assert full.fill.tolist() == [M] * B

    whole = full.snapshot()
    limited.restore(whole)
    assert limited.fill.tolist() == [K] * B
    cut(full, K)
    for name, rows in full.memory().items():
        assert limited.memory()[name].tobytes() == rows.tobytes()
    assert limited.step(tokens(4, 2)).tobytes() == full.step(tokens(4, 2)).tobytes()

    full.restore(whole)
    limited.put(1, full.take(0))
    assert limited.fill.tolist() == [K] * B
    limited.select([1, 1])
    assert limited.fill.tolist() == [K, K]
    limited.reset([0])
    assert limited.fill.tolist() == [start[0], K]
    limited.reset()
    assert limited.fill.tolist() == start[:2]
    limited.select([0, 1, 0])
    short.reset()
    assert_close(limited.feed(tokens(11, 3)), short.feed(tokens(11, 3)))

    kept = limited.snapshot()
    assert max(kept.fill.tolist()) == K
    wide = model.stream()
    wide.restore(kept)
    wide.feed(tokens(2, 4))
    assert wide.fill.tolist() == [K + 2] * B, "a state that was cut goes on in a stream without a limit"


@pytest.mark.parametrize("kind", ["ring", "rolled"])
def test_the_limit_of_a_row_is_for_whoever_stands_there(opened, kind: str) -> None:
    stream = opened(kind).stream()
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


def test_segments_that_are_not_committed_change_nothing(opened) -> None:
    limited = opened("ring").stream(memory_length=K)
    limited.feed(tokens(9, 1))
    before = limited.snapshot()
    looked = limited.run({"tokens": tokens(4, 2)}, commit=False)
    assert limited.fill.tolist() == before.fill.tolist()
    for name, array in limited.run({"tokens": tokens(4, 2)}).items():
        assert array.tobytes() == looked[name].tobytes()


def test_draws_and_scores_see_as_little(opened) -> None:
    limited, short = opened("ring").stream(1, memory_length=K), opened("ring", K).stream(1)
    text = tokens(14, 1, rows=1)
    assert_close(limited.score(text), short.score(text))
    for stream in (limited, short):
        stream.reset()
    drawn = [np.concatenate([*stream.generate(text, 12, seed=3)]).tolist() for stream in (limited, short)]
    assert drawn[0] == drawn[1]


def test_idle_sequences_behind_the_last_one_that_runs_keep_their_limit(opened) -> None:
    for kind in ("ring", "rolled"):
        limited, short = opened(kind).stream(memory_length=K), opened(kind, K).stream()
        for seed, lengths in enumerate(([4, 4, 4], [4, 0, 0], [3, 0, 0], [2, 4, 0], [4, 4, 4], [0, 0, 1], [1, 1, 1])):
            ids = tokens(4, seed)
            assert_close(limited.step(ids, lengths), short.step(ids, lengths))


def test_all_rows_are_no_limit(opened) -> None:
    model = opened("ring")
    limited, plain = model.stream(memory_length=M), model.stream()
    assert limited.feed(tokens(23, 1)).tobytes() == plain.feed(tokens(23, 1)).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("update", ["ring", "rolled"])
def test_a_window_stays_what_it_was(make_bundle, update: str) -> None:
    """With same_length a position sees M keys before it; a limit takes rows away, and the window stays."""
    path = make_bundle(batch_size=B, config={"same_length": True, "clamp_length": 3})
    model = load(path, "cpu", threads=1, update=update)
    limited, by_hand = model.stream(memory_length=K), model.stream()
    for ids, lengths in segments(12):
        cut(by_hand, K)
        assert limited.step(ids, lengths).tobytes() == by_hand.step(ids, lengths).tobytes()


@pytest.mark.parametrize("wrong", [-1, M + 1, 2.0, True, "3", [3], 2**70], ids=repr)
def test_what_is_no_limit_is_refused(opened, wrong: Any) -> None:
    with pytest.raises(UsageError, match=rf"memory_length is .*, expected 0 … {M}; export with --memory-length"):
        opened("ring").stream(memory_length=wrong)


def test_a_model_that_counts_no_rows_refuses_it_by_name(tmp_path) -> None:
    model = load(counting().write(tmp_path / "step.txl"), backend="cpu", threads=1)
    with pytest.raises(UsageError, match="memory_length is 2, but this model counts no memory rows; leave it out"):
        model.stream(memory_length=2)


@pytest.mark.slow
def test_a_model_without_memory_takes_no_rows_alone(make_bundle) -> None:
    model = load(make_bundle(batch_size=B, config={"memory_length": 0}), "cpu", threads=1)
    assert model.stream(memory_length=0).fill.tolist() == [0] * B
    with pytest.raises(UsageError, match="memory_length is 1, expected 0 … 0"):
        model.stream(memory_length=1)
