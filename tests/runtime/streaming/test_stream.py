"""Streams: steps, cuts, memory, generation and state, one sentence per test.

Equal means the same bits, or within 1e-5 where the number of sequences differs. That the numbers are those of the
reference, a bundle's own test says (`test_selftest.py`), the conformance list and the files of release 0.8.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from frozen import KEPT, opened
from txl_runtime import Stream, StreamState, UsageError

L = 4
KINDS = (*KEPT, "zeros, rolled", "clusters")
kinds = pytest.mark.parametrize("kind", KINDS)
both = pytest.mark.parametrize("kind", ["ring", "rolled"])


def streams(kind: str, count: int = 2, rows: int | None = None) -> list[Stream]:
    return [opened(kind).stream(rows) for _ in range(count)]


def random_tokens(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 41, (rows, columns)).astype(np.int32)


def same_bits(found: np.ndarray, expected: np.ndarray) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and found.tobytes() == expected.tobytes()


def same_state(stream: Stream, other: Stream | StreamState) -> bool:
    ours, theirs = stream.memory(), other.memory() if isinstance(other, Stream) else other.memory
    same = ours.keys() == theirs.keys() and all(same_bits(ours[name], theirs[name]) for name in ours)
    return same and same_bits(stream.fill, other.fill)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


# --- step, feed, score --------------------------------------------------------------------------------------------


@kinds
def test_feed_is_step_over_the_documented_cuts_bit_for_bit(kind):
    fed, stepped = streams(kind)
    for seed, columns in enumerate((1, 3, 4, 5, 8, 11, 11)):
        tokens = random_tokens(fed.batch_size, columns, seed)
        lengths = None if seed % 2 else np.array([columns, columns // 2, 0])[: fed.batch_size]
        expected = []
        for first in range(0, columns, L):
            part = tokens[:, first : first + L]
            left = None if lengths is None else np.clip(lengths - first, 0, part.shape[1])
            expected.append(stepped.step(part, left))
        assert same_bits(fed.feed(tokens, lengths), np.concatenate(expected, axis=1))
        assert same_state(fed, stepped)


@kinds
def test_feed_with_lengths_gives_every_sequence_what_it_gets_alone(kind):
    (together,) = streams(kind, 1)
    b = together.batch_size
    tokens, lengths = random_tokens(b, 11), [11, 6, 0][:b]
    found = [together.feed(tokens, lengths), together.feed(tokens, lengths[::-1])]
    memory = together.memory()
    for row in range(b):
        (alone,) = streams(kind, 1, 1)
        for result, count in zip(found, (lengths[row], lengths[b - 1 - row]), strict=True):
            if count:
                assert_close(result[row, :count], alone.feed(tokens[row : row + 1, :count])[0])
        assert alone.fill[0] == together.fill[row]
        for name, rows in alone.memory().items():
            assert_close(memory[name][row, memory[name].shape[1] - rows.shape[1] :], rows[0])


@both
def test_results_beyond_the_lengths_are_exactly_zero_and_the_callers_own(kind):
    for call in ("step", "feed"):
        (stream,) = streams(kind, 1)
        lengths = [4, 1, 0]
        found = getattr(stream, call)(random_tokens(3, 4), lengths)
        for row, count in enumerate(lengths):
            assert (found[row, :count] < 0).all()
            assert same_bits(found[row, count:], np.zeros((4 - count, 41), np.float32))
        kept = found.copy()
        getattr(stream, call)(random_tokens(3, 4, 1))
        assert same_bits(found, kept)


@pytest.mark.parametrize("kind", ["ring", "rolled", "hidden", "clusters"])
def test_a_score_of_sequences_of_different_lengths_is_that_of_each_alone(kind):
    """Nothing of what stands beyond a length counts, be it an id that there is not."""
    for lengths in ([10, 3, 0], [1, 0, 10], [9, 5, 6], [1, 1, 0], [10, 10, 10]):
        scored, fed, whole = streams(kind, 3)
        b, counts = fed.batch_size, np.array(lengths[: fed.batch_size])
        tokens = random_tokens(b, 10)
        if (counts == 10).all():
            assert same_bits(scored.score(tokens, counts), whole.score(tokens))
            continue
        tokens[np.arange(10) >= counts[:, None]] = 999
        found = scored.score(tokens, counts)
        for row, length in enumerate(counts):
            if length:
                assert_close(found[row, : length - 1], opened(kind).stream(1).score(tokens[[row], :length])[0])
            assert not found[row, max(length - 1, 0) :].any()
        fed.feed(np.where(tokens < 41, tokens, 0)[:, :-1], np.maximum(counts - 1, 0))
        assert same_state(scored, fed)


def test_a_score_refuses_lengths_that_no_sequence_has():
    for lengths in ([1, 2], [1, 2, 11], [1, 2, -1]):
        with pytest.raises(UsageError, match=r"expected 3 whole numbers of 0 … 10; 0 leaves a stream idle"):
            opened("ring").stream().score(random_tokens(3, 10), lengths)


# --- generate -----------------------------------------------------------------------------------------------------

PROMPT, PROMPT_LENGTHS = random_tokens(3, 6, 5), np.array([6, 3, 1])


def greedy_by_hand(stream: Stream, steps: int) -> list[np.ndarray]:
    """The argmax chain after the prompt; its last token is not fed."""
    b = stream.batch_size
    last = stream.feed(PROMPT[:b], PROMPT_LENGTHS[:b])[np.arange(b), PROMPT_LENGTHS[:b] - 1]
    chain = [last.argmax(axis=1)]
    while len(chain) < steps:
        chain.append(stream.step(chain[-1][:, None])[:, 0].argmax(axis=1))
    return chain


def generated(kind: str, rows: int = 3, prompt: np.ndarray = PROMPT, **options: Any) -> list[list[int]]:
    return np.stack(list(opened(kind).stream(rows).generate(prompt[:rows], 12, **options))).T.tolist()


@both
def test_draws_follow_their_seed_and_not_the_batch(kind):
    first, again, other = (generated(kind, seed=seed) for seed in (7, 7, 8))
    assert first == again
    assert all(ours != theirs for ours, theirs in zip(first, other, strict=True))
    assert generated(kind) != generated(kind), "without a seed they are fresh"
    alone, pair = (generated(kind, rows, seed=7) for rows in (1, 2))
    assert [alone[0], pair[1]] == [first[0], first[1]]
    assert pair[0] == alone[0]
    same = np.repeat(PROMPT[:1], 3, axis=0)
    assert len({tuple(row) for row in generated(kind, 3, same, seed=7)}) == 3, "nor the prompt alone"


@both
def test_a_stopped_sequence_idles_and_repeats_its_token_until_all_have_stopped(kind):
    stream, by_hand, freely = streams(kind, 3)
    free = np.stack(greedy_by_hand(freely, 12))
    # One token that each sequence yields, at different times: they all stop, none at first.
    stops = [int(free[4, 0]), int(free[2, 1]), int(free[6, 2])]
    ends = [int(np.isin(free[:, row], stops).argmax()) for row in range(3)]
    assert len(set(ends)) > 1, "the sequences should stop at different times"
    found = np.stack(list(stream.generate(PROMPT, 12, temperature=0, stop_tokens=stops, lengths=PROMPT_LENGTHS)))
    assert len(found) == max(ends) + 1
    for row, end in enumerate(ends):
        assert found[: end + 1, row].tolist() == free[: end + 1, row].tolist()
        assert set(found[end:, row].tolist()) == {int(free[end, row])}
    by_hand.feed(PROMPT, PROMPT_LENGTHS)
    for index in range(max(ends)):
        by_hand.step(free[index][:, None], [int(index < end) for end in ends])
    assert same_state(stream, by_hand), "a token that ended a sequence is not fed"


def thrown_into(drawn: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        drawn.throw(ZeroDivisionError())
    gc.collect()  # the error's frames hold it


ENDS: dict[str, Callable[[Any], None]] = {
    "closed": lambda drawn: drawn.close(),
    "thrown into": thrown_into,
    "collected": lambda drawn: None,
}


@both
@pytest.mark.parametrize(
    ("end", "taken"), [("closed", 0), ("thrown into", 0), ("collected", 1), ("closed", 4), ("thrown into", 4)]
)
def test_however_a_generation_ends_the_stream_holds_what_was_yielded_before_and_goes_on(kind, end, taken):
    stream, by_hand = streams(kind)
    drawn = stream.generate(PROMPT, 10, seed=3)
    assert same_state(stream, by_hand), "nothing is fed before the first token is asked for"
    found = list(itertools.islice(drawn, taken))
    ENDS[end](drawn)
    there = weakref.ref(drawn)
    del drawn
    assert there() is None, "without the collector"
    if taken:
        by_hand.feed(PROMPT)
    for token in found[:-1]:
        by_hand.step(token[:, None])
    assert same_state(stream, by_hand)
    again = [list(s.generate(PROMPT, 3, seed=5)) for s in (stream, by_hand)]
    assert same_bits(*map(np.array, again))
    assert same_state(stream, by_hand)


def test_a_generation_keeps_its_stream_and_goes_with_it():
    stream, other = streams("ring")
    expected = list(other.generate(PROMPT, 5, seed=3))
    there, drawn = weakref.ref(stream), stream.generate(PROMPT, 5, seed=3)
    first = next(drawn)
    del stream
    assert same_bits(np.array([first, *drawn]), np.array(expected))
    del drawn
    assert there() is None


@both
def test_no_new_tokens_only_feeds_the_prompt(kind):
    stream, by_hand = streams(kind)
    assert list(stream.generate(PROMPT, 0, lengths=PROMPT_LENGTHS)) == []
    by_hand.feed(PROMPT, PROMPT_LENGTHS)
    assert same_state(stream, by_hand)


def test_the_caller_may_change_the_yielded_array_and_give_one_sequence_a_flat_prompt():
    expected, found = generated("ring", 1, temperature=0), []
    for token in opened("ring").stream(1).generate(PROMPT[0], 12, temperature=0):
        found.append(token.tolist())
        token[:] = -1
    assert np.array(found).T.tolist() == expected


# --- memory, fill, reset, select ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ring", "rolled", "hidden", "zeros"])
def test_memory_has_one_entry_per_layer_and_role_with_the_newest_row_last(kind):
    (stream,) = streams(kind, 1)
    b, roles, width = stream.batch_size, ("key", "value"), (2, 4)
    if kind == "hidden":
        roles, width = ("hidden",), (8,)
    filled = 6 if kind == "zeros" else 0
    assert stream.fill.tolist() == [filled] * b
    assert {name: rows.shape for name, rows in stream.memory().items()} == {
        f"layers.{layer:02d}.{role}": (b, filled, *width) for layer in range(2) for role in roles
    }
    if kind == "zeros":
        assert all(np.abs(rows).max() > 0.01 for rows in stream.memory().values()), "keys and values of zeros are none"
        return
    stream.feed(random_tokens(b, 5), [5, 2, 0][:b])
    memory = stream.memory()
    assert stream.fill.tolist() == [5, 2, 0][:b]
    for rows in memory.values():
        assert rows.shape == (b, 5, *width)
        assert rows.flags.c_contiguous
        for row, fill in enumerate([5, 2, 0][:b]):
            assert same_bits(rows[row, : 5 - fill], np.zeros((5 - fill, *width), np.float32))
            assert all(np.abs(each).max() > 0 for each in rows[row, 5 - fill :])
    stream.step(random_tokens(b, 1, 1))
    for name, rows in stream.memory().items():
        assert same_bits(rows[0, :5], memory[name][0]), "what was there has moved up by one row"


@both
def test_memory_fill_and_snapshot_are_copies(kind):
    stream, untouched = streams(kind)
    for other in (stream, untouched):
        other.feed(random_tokens(3, 9))
    snapshot = stream.snapshot()
    for array in (*stream.memory().values(), *snapshot.memory.values(), stream.fill, snapshot.fill):
        array[:] = 3
    assert same_state(stream, untouched)


@pytest.mark.parametrize("kind", ["ring", "rolled", "hidden", "zeros"])
def test_what_counted_of_dropped_sequences_does_not_stay_behind(kind):
    """A segment of 4 of all sequences, then of 1 of one: a program of 1 token cannot count 4."""
    (stream,), (alone,) = streams(kind, 1), streams(kind, 1, 1)
    tokens = random_tokens(stream.batch_size, 4)
    stream.step(tokens)
    alone.step(tokens[:1])
    stream.select([0])
    for seed in range(30):
        token = random_tokens(1, 1, seed)
        assert_close(stream.step(token), alone.step(token))
    assert stream.loop.fill[1:].tolist() == opened(kind).stream().loop.fill[1:].tolist(), "nobody is there"


# --- snapshots ----------------------------------------------------------------------------------------------------
