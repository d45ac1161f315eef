"""Streams against the reference: steps, cuts, memory, generation and state, one sentence per test.

The reference is built here from the weights the bundle was exported from, in float64, and is run one segment at a
time; equal means within 1e-5, what the parity ladder aims at. Where only the runtime is involved, equal means the same
bits.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import random_state, small_config
from txl_export.checkpoints.txl import TxlConfig
from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.families.transformer_xl.parity.oracle import OracleStreams
from txl_runtime import Model, Stream, StreamState, TxlError, UsageError, load
from txl_runtime.bundle.format1 import Dialect, ModelConfig

L, M, B, V, LAYERS = 4, 7, 3, 60, 2
TOLERANCE = 1e-5

# What is exported, by what is special about it. All bundles have B 3 and programs of 4 and 1 tokens. What keeps keys
# and values is run with both update rules; where a name says nothing of it, with the ring.
KINDS: dict[str, dict[str, Any]] = {
    "kv": {"config": {}},
    "kv, rolled": {"config": {}, "update": "rolled"},
    "hidden": {"config": {}, "memory": "hidden"},
    "zeros": {"config": {"pre_lnorm": True, "attention_bias": True, "memory_start": "zeros"}},
    "zeros, rolled": {
        "config": {"pre_lnorm": True, "attention_bias": True, "memory_start": "zeros"},
        "update": "rolled",
    },
    "window": {"config": {"same_length": True, "clamp_length": 3}},
    "window, rolled": {"config": {"same_length": True, "clamp_length": 3}, "update": "rolled"},
    "adaptive": {"config": {"cutoffs": (20, 40), "div_val": 2}},
    "no memory": {"config": {"memory_length": 0}},
}
WITH_MEMORY = [kind for kind in KINDS if kind != "no memory"]

# (columns, tokens that count in each of three sequences): from empty to rolled over, partial and idle on the way.
CALLS = [
    (4, [4, 2, 0]),
    (1, [1, 1, 1]),
    (3, [0, 3, 2]),
    (4, [4, 4, 4]),
    (2, [0, 0, 0]),
    (1, [0, 1, 0]),
    (4, [1, 0, 4]),
    (4, [4, 4, 3]),
    (1, [1, 1, 1]),
    (3, [3, 1, 2]),
]


@pytest.fixture(scope="module")
def models(make_bundle):
    """The loaded bundle of a kind."""
    opened: dict[str, Model] = {}

    def open_kind(kind: str) -> Model:
        if kind not in opened:
            options = {"batch_size": B, **KINDS[kind]}
            update = options.pop("update", None)
            opened[kind] = model = load(make_bundle(**options), threads=1, update=update)
            ring = model.manifest.transformer_xl.memory == "kv" and model.memory_length and update is None
            assert model.update == ("ring" if ring else "rolled")
        return opened[kind]

    return open_kind


@pytest.fixture(scope="module", params=["kv", "kv, rolled"])
def kv(request):
    """The plain model, with either update rule."""
    return request.param


@pytest.fixture(scope="module", params=["window", "window, rolled"])
def window(request):
    """The model with a window, with either update rule."""
    return request.param


def reference_streams(model: Model, kind: str, streams: int) -> OracleStreams:
    values = small_config(**KINDS[kind]["config"])
    own = msgspec.convert(values, TxlConfig)
    config = ModelConfig(**{name: getattr(own, name) for name in ModelConfig.__struct_fields__})
    dialect = Dialect(
        memory_start=own.memory_start,
        window=own.memory_length if own.same_length else None,
        clamp_length=own.clamp_length,
    )
    reference = PaperModel(config, dialect, own.memory_length, random_state(values), torch.float64)
    return OracleStreams(model.manifest, reference, streams)


def random_tokens(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, (rows, columns)).astype(np.int32)


def same_bits(found: np.ndarray, expected: np.ndarray) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and found.tobytes() == expected.tobytes()


def same_state(stream: Stream, other: Stream) -> bool:
    ours, theirs = stream.memory(), other.memory()
    same = ours.keys() == theirs.keys() and all(same_bits(ours[name], theirs[name]) for name in ours)
    return same and same_bits(stream.fill, other.fill)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def assert_same_memory(stream: Stream, truth: OracleStreams) -> None:
    found, expected = stream.memory(), dict(truth.shown())
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        assert found[name].dtype == np.float32
        assert_close(found[name], rows)


# --- step, feed, score --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("kind", WITH_MEMORY)
def test_chained_steps_equal_the_reference_in_log_probabilities_and_memory(models, kind, streams):
    model = models(kind)
    stream, truth = model.stream(streams), reference_streams(model, kind, streams)
    assert_same_memory(stream, truth)
    for index, (columns, counts) in enumerate(CALLS):
        tokens, lengths = random_tokens(streams, columns, index), np.array(counts[:streams], np.int32)
        found = stream.step(tokens, lengths)
        assert found.dtype == np.float32
        assert_close(found, truth.step(tokens, lengths))
        assert_same_memory(stream, truth)
        assert stream.fill.tolist() == truth.rows
    assert stream.fill.min() == M


@pytest.mark.parametrize("streams", [1, 3])
def test_without_memory_every_step_starts_anew(models, streams):
    model = models("no memory")
    stream, truth = model.stream(streams), reference_streams(model, "no memory", streams)
    for index, (columns, counts) in enumerate(CALLS):
        tokens, lengths = random_tokens(streams, columns, index), np.array(counts[:streams], np.int32)
        assert_close(stream.step(tokens, lengths), truth.step(tokens, lengths))
        assert stream.memory() == {}
        assert stream.fill.tolist() == [0] * streams


@pytest.mark.parametrize("kind", ["zeros", "zeros, rolled"])
def test_zeros_start_attends_to_keys_and_values_that_are_not_zero(models, kind):
    stream = models(kind).stream()
    assert stream.fill.tolist() == [M] * B
    for rows in stream.memory().values():
        assert rows.shape[1] == M
        assert np.abs(rows).max() > 0.01


@pytest.mark.parametrize("columns", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("kind", ["kv", "kv, rolled", "hidden", "window", "adaptive"])
def test_feed_is_step_over_the_documented_cuts_bit_for_bit(models, kind, columns):
    fed, stepped = models(kind).stream(), models(kind).stream()
    for seed in range(2):
        tokens = random_tokens(B, columns, seed)
        cuts = [L] * (columns // L) + [columns % L] * (columns % L > 0)
        parts = np.split(tokens, np.cumsum(cuts)[:-1], axis=1)
        assert same_bits(fed.feed(tokens), np.concatenate([stepped.step(part) for part in parts], axis=1))
        assert same_state(fed, stepped)


def test_feed_with_lengths_is_step_with_what_is_left_of_them(models, kv):
    fed, stepped = models(kv).stream(), models(kv).stream()
    tokens, lengths = random_tokens(B, 11), np.array([9, 0, 4])
    expected = [
        stepped.step(tokens[:, first:last], np.clip(lengths - first, 0, last - first))
        for first, last in ((0, 4), (4, 8), (8, 11))
    ]
    assert same_bits(fed.feed(tokens, lengths), np.concatenate(expected, axis=1))
    assert same_state(fed, stepped)


@pytest.mark.parametrize("kind", KINDS)
def test_feed_with_lengths_gives_every_stream_what_it_gets_alone(models, kind):
    tokens, lengths = random_tokens(B, 11), [11, 6, 0]
    together = models(kind).stream()
    found = [together.feed(tokens, lengths), together.feed(tokens, lengths[::-1])]
    memory = together.memory()
    for row in range(B):
        alone = models(kind).stream(1)
        for result, count in zip(found, (lengths[row], lengths[B - 1 - row]), strict=True):
            if count:
                assert_close(result[row, :count], alone.feed(tokens[row : row + 1, :count])[0])
        assert alone.fill[0] == together.fill[row]
        for name, rows in alone.memory().items():
            assert_close(memory[name][row, memory[name].shape[1] - rows.shape[1] :], rows[0])


@pytest.mark.parametrize("call", ["step", "feed"])
def test_results_beyond_the_lengths_are_exactly_zero(models, kv, call):
    stream = models(kv).stream()
    lengths = [4, 1, 0]
    found = getattr(stream, call)(random_tokens(B, 4), lengths)
    for row, count in enumerate(lengths):
        assert (found[row, :count] < 0).all()
        assert same_bits(found[row, count:], np.zeros((4 - count, V), np.float32))


def test_an_idle_stream_keeps_its_memory_bit_for_bit(models, kv):
    stream = models(kv).stream()
    stream.feed(random_tokens(B, 5), [5, 5, 3])
    before = stream.snapshot()
    stream.feed(random_tokens(B, 9, 1), [0, 0, 0])
    assert same_bits(stream.fill, before.fill)
    assert all(same_bits(rows, before.memory[name]) for name, rows in stream.memory().items())
    stream.step(random_tokens(B, 1, 2), [0, 1, 0])
    assert stream.fill.tolist() == [5, 6, 3]
    for name, rows in stream.memory().items():
        assert same_bits(rows[0, 1:], before.memory[name][0])
        assert same_bits(rows[2, 3:], before.memory[name][2, 2:])


def test_a_returned_array_is_the_callers_own(models, kv):
    stream = models(kv).stream()
    first = stream.step(random_tokens(B, 4))
    kept = first.copy()
    stream.step(random_tokens(B, 4, 1))
    assert same_bits(first, kept)


@pytest.mark.parametrize("columns", [2, 5, 6, 10])
@pytest.mark.parametrize("kind", ["kv", "kv, rolled", "hidden", "adaptive", "no memory"])
def test_score_is_what_feed_gives_the_next_tokens(models, kind, columns):
    scored, fed = models(kind).stream(), models(kind).stream()
    tokens = random_tokens(B, columns)
    found = scored.score(tokens)
    expected = -np.take_along_axis(fed.feed(tokens[:, :-1]), tokens[:, 1:, None], axis=2)[..., 0]
    assert found.shape == (B, columns - 1)
    assert same_bits(found, expected)
    assert same_state(scored, fed)


def test_score_of_a_single_token_is_empty_and_leaves_the_memory(models, kv):
    stream, untouched = models(kv).stream(), models(kv).stream()
    found = stream.score(random_tokens(B, 1))
    assert (found.shape, found.dtype) == ((B, 0), np.float32)
    assert same_state(stream, untouched)


@pytest.mark.parametrize("kind", ["kv", "kv, rolled", "hidden", "adaptive", "no memory"])
def test_a_score_of_sequences_of_different_lengths_is_that_of_each_alone(models, kind):
    """Nothing of what stands beyond a length counts, be it an id that there is not."""
    for lengths in ([10, 3, 0], [1, 0, 10], [9, 5, 6], [1, 1, 0]):
        scored, fed, tokens = models(kind).stream(), models(kind).stream(), random_tokens(B, 10)
        tokens[np.arange(10) >= np.array(lengths)[:, None]] = V + 7
        found = scored.score(tokens, lengths)
        assert (found.shape, found.dtype) == ((B, 9), np.float32)
        for row, length in enumerate(lengths):
            if length:
                expected = models(kind).stream(1).score(tokens[row : row + 1, :length])[0]
                assert_close(found[row, : length - 1], expected)
            assert not found[row, max(length - 1, 0) :].any()
        fed.feed(np.where(tokens < V, tokens, 0)[:, :-1], np.maximum(np.array(lengths) - 1, 0))
        assert same_state(scored, fed)


def test_lengths_of_a_score_that_are_all_its_columns_change_no_bit(models, kv):
    tokens = random_tokens(B, 10)
    assert same_bits(models(kv).stream().score(tokens, [10] * B), models(kv).stream().score(tokens))


def test_a_score_refuses_lengths_that_no_sequence_has(models, kv):
    for lengths in ([1, 2], [1, 2, 11], [1, 2, -1]):
        with pytest.raises(UsageError, match=r"expected 3 whole numbers of 0 … 10; 0 leaves a stream idle"):
            models(kv).stream().score(random_tokens(B, 10), lengths)


# --- how a sequence is cut ----------------------------------------------------------------------------------------


def in_pieces(stream: Stream, tokens: np.ndarray, sizes: list[int]) -> np.ndarray:
    ends = np.cumsum(sizes)
    assert ends[-1] == tokens.shape[1]
    return np.concatenate([stream.feed(tokens[:, e - size : e]) for e, size in zip(ends, sizes, strict=True)], axis=1)


def cuts(total: int, largest: int) -> st.SearchStrategy[list[int]]:
    """Sizes of pieces that add up to `total`."""

    def trim(sizes: list[int]) -> list[int]:
        ends = [*(end for end in np.cumsum(sizes).tolist() if end < total), total]
        return np.diff([0, *ends]).tolist()

    return st.lists(st.integers(1, largest), min_size=total, max_size=total).map(trim)


@pytest.mark.parametrize("size", [1, 7, L])
def test_with_a_window_the_result_does_not_depend_on_the_piece_size(models, window, size):
    tokens = random_tokens(B, 28)
    expected = models(window).stream().feed(tokens)
    found = in_pieces(models(window).stream(), tokens, [size] * (28 // size))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@settings(max_examples=25, deadline=None, database=None, derandomize=True)
@given(sizes=cuts(27, 9), seed=st.integers(0, 1000))
def test_with_a_window_no_cutting_changes_the_result(models, window, sizes, seed):
    tokens = random_tokens(1, 27, seed)
    expected = models(window).stream(1).feed(tokens)
    found = in_pieces(models(window).stream(1), tokens, sizes)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_without_a_window_the_cutting_is_part_of_the_function(models, kv):
    tokens = random_tokens(1, 28)
    ones = in_pieces(models(kv).stream(1), tokens, [1] * 28)
    fours = in_pieces(models(kv).stream(1), tokens, [4] * 7)
    assert np.abs(ones - fours)[:, : M + 1].max() < 1e-4, "as long as nothing has left the memory, cuts do not matter"
    assert np.abs(ones - fours).max() > 1e-2


@settings(max_examples=15, deadline=None, database=None, derandomize=True)
@given(sizes=cuts(22, L), seed=st.integers(0, 1000))
def test_without_a_window_steps_equal_the_reference_for_the_same_cuts(models, kv, sizes, seed):
    tokens = random_tokens(1, 22, seed)
    stream, truth = models(kv).stream(1), reference_streams(models(kv), "kv", 1)
    for end, size in zip(np.cumsum(sizes), sizes, strict=True):
        piece = tokens[:, end - size : end]
        assert_close(stream.step(piece), truth.step(piece, np.array([size], np.int32)))


# --- generate -----------------------------------------------------------------------------------------------------

PROMPT, PROMPT_LENGTHS = random_tokens(B, 6, 5), np.array([6, 3, 1])


def greedy_by_hand(stream: Stream, steps: int) -> list[np.ndarray]:
    """The argmax chain after the prompt; its last token is not fed."""
    last = stream.feed(PROMPT, PROMPT_LENGTHS)[np.arange(B), PROMPT_LENGTHS - 1]
    chain = [last.argmax(axis=1)]
    while len(chain) < steps:
        chain.append(stream.step(chain[-1][:, None])[:, 0].argmax(axis=1))
    return chain


@pytest.mark.parametrize("kind", ["kv", "kv, rolled", "hidden", "zeros", "adaptive", "no memory"])
def test_greedy_generation_is_the_chain_of_most_probable_tokens(models, kind):
    stream, by_hand = models(kind).stream(), models(kind).stream()
    found = list(stream.generate(PROMPT, 10, temperature=0, lengths=PROMPT_LENGTHS))
    assert all(token.shape == (B,) and token.dtype == np.int32 for token in found)
    assert np.stack(found).tolist() == np.stack(greedy_by_hand(by_hand, 10)).tolist()
    assert same_state(stream, by_hand)


def test_top_k_of_one_is_greedy_at_any_temperature(models, kv):
    greedy = models(kv).stream().generate(PROMPT, 8, temperature=0)
    sampled = models(kv).stream().generate(PROMPT, 8, temperature=5.0, top_k=1)
    assert np.stack(list(sampled)).tolist() == np.stack(list(greedy)).tolist()


def generated(model: Model, streams: int, prompt: np.ndarray = PROMPT, **options: Any) -> list[list[int]]:
    tokens = model.stream(streams).generate(prompt[:streams], 12, **options)
    return np.stack(list(tokens)).T.tolist()


def test_generation_is_reproducible_by_its_seed(models, kv):
    first, again, other = (generated(models(kv), B, seed=seed) for seed in (7, 7, 8))
    assert first == again
    assert all(ours != theirs for ours, theirs in zip(first, other, strict=True))


def test_without_a_seed_draws_are_fresh(models, kv):
    assert generated(models(kv), B) != generated(models(kv), B)


def test_a_streams_draws_do_not_depend_on_its_batch(models, kv):
    alone, pair, all_three = (generated(models(kv), streams, seed=7) for streams in (1, 2, 3))
    assert alone[0] == pair[0] == all_three[0]
    assert pair[1] == all_three[1]


def test_streams_with_the_same_prompt_draw_differently(models, kv):
    same = np.repeat(PROMPT[:1], B, axis=0)
    assert len({tuple(row) for row in generated(models(kv), B, same, seed=7)}) == B


def test_a_stopped_stream_idles_and_repeats_its_token_until_all_have_stopped(models, kv):
    free = np.stack(greedy_by_hand(models(kv).stream(), 12))
    # One token that each stream yields, at different times: they all stop, none at first.
    stops = [int(free[4, 0]), int(free[2, 1]), int(free[6, 2])]
    ends = [int(np.isin(free[:, row], stops).argmax()) for row in range(B)]
    assert len(set(ends)) > 1, "the streams should stop at different times"
    stream = models(kv).stream()
    found = np.stack(list(stream.generate(PROMPT, 12, temperature=0, stop_tokens=stops, lengths=PROMPT_LENGTHS)))
    assert len(found) == max(ends) + 1
    for row, end in enumerate(ends):
        assert found[: end + 1, row].tolist() == free[: end + 1, row].tolist()
        assert set(found[end:, row].tolist()) == {int(free[end, row])}

    by_hand = models(kv).stream()
    by_hand.feed(PROMPT, PROMPT_LENGTHS)
    for index in range(max(ends)):
        by_hand.step(free[index][:, None], [int(index < end) for end in ends])
    assert same_state(stream, by_hand), "a token that ended a stream is not fed"


def test_a_stop_token_that_never_comes_changes_nothing(models, kv):
    free = generated(models(kv), B, temperature=0)
    missing = next(token for token in range(V) if not any(token in row for row in free))
    assert generated(models(kv), B, temperature=0, stop_tokens=(missing,)) == free


def test_nothing_is_fed_before_the_first_token_is_asked_for(models, kv):
    stream, untouched = models(kv).stream(), models(kv).stream()
    stream.generate(PROMPT, 5)
    assert same_state(stream, untouched)


@pytest.mark.parametrize("taken", [1, 3])
def test_stopping_early_leaves_what_was_yielded_before_in_memory(models, kv, taken):
    stream, by_hand = models(kv).stream(), models(kv).stream()
    found = list(itertools.islice(stream.generate(PROMPT, 10, seed=3), taken))
    by_hand.feed(PROMPT)
    for token in found[:-1]:
        by_hand.step(token[:, None])
    assert same_state(stream, by_hand)
    assert same_bits(stream.step(found[-1][:, None]), by_hand.step(found[-1][:, None]))


def thrown_into(drawn: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        drawn.throw(ZeroDivisionError())


ENDS: dict[str, Callable[[Any], None]] = {
    "closed": lambda drawn: drawn.close(),
    "thrown into": thrown_into,
    "collected": lambda drawn: None,
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("taken", [0, 1, 4])
def test_however_a_generation_ends_the_stream_holds_what_was_yielded_before_and_goes_on(models, kv, end, taken):
    stream, by_hand = models(kv).stream(), models(kv).stream()
    drawn = stream.generate(PROMPT, 10, seed=3)
    found = list(itertools.islice(drawn, taken))
    ENDS[end](drawn)
    there = weakref.ref(drawn)
    del drawn
    gc.collect()
    assert there() is None
    if taken:
        by_hand.feed(PROMPT)
    for token in found[:-1]:
        by_hand.step(token[:, None])
    assert same_state(stream, by_hand)
    again = [list(s.generate(PROMPT, 3, seed=5)) for s in (stream, by_hand)]
    assert same_bits(*map(np.array, again))
    assert same_state(stream, by_hand)


def test_a_generation_keeps_its_stream_and_goes_with_it(models, kv):
    stream = models(kv).stream()
    expected = list(models(kv).stream().generate(PROMPT, 5, seed=3))
    there, drawn = weakref.ref(stream), stream.generate(PROMPT, 5, seed=3)
    first = next(drawn)
    del stream
    gc.collect()
    assert same_bits(np.array([first, *drawn]), np.array(expected))
    del drawn
    gc.collect()
    assert there() is None


def test_no_new_tokens_only_feeds_the_prompt(models, kv):
    stream, by_hand = models(kv).stream(), models(kv).stream()
    assert list(stream.generate(PROMPT, 0, lengths=PROMPT_LENGTHS)) == []
    by_hand.feed(PROMPT, PROMPT_LENGTHS)
    assert same_state(stream, by_hand)


def test_the_caller_may_change_the_yielded_array(models, kv):
    expected = generated(models(kv), B, temperature=0)
    found = []
    for token in models(kv).stream().generate(PROMPT, 12, temperature=0):
        found.append(token.tolist())
        token[:] = -1
    assert np.array(found).T.tolist() == expected


def test_a_single_stream_takes_a_flat_prompt(models, kv):
    flat = models(kv).stream(1).generate(PROMPT[0], 5, temperature=0)
    nested = models(kv).stream(1).generate(PROMPT[:1], 5, temperature=0)
    assert [token.tolist() for token in flat] == [token.tolist() for token in nested]


# --- memory, fill, reset, select ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "roles", "width"),
    [
        ("kv", ("key", "value"), (2, 8)),
        ("kv, rolled", ("key", "value"), (2, 8)),
        ("hidden", ("hidden",), (16,)),
    ],
)
def test_memory_has_one_entry_per_layer_and_role_with_the_newest_row_last(models, kind, roles, width):
    stream = models(kind).stream()
    assert {name: rows.shape for name, rows in stream.memory().items()} == {
        f"layers.{layer:02d}.{role}": (B, 0, *width) for layer in range(LAYERS) for role in roles
    }
    stream.feed(random_tokens(B, 5), [5, 2, 0])
    memory = stream.memory()
    assert stream.fill.tolist() == [5, 2, 0]
    for rows in memory.values():
        assert rows.shape == (B, 5, *width)
        assert rows.flags.c_contiguous
        for row, fill in enumerate([5, 2, 0]):
            assert same_bits(rows[row, : 5 - fill], np.zeros((5 - fill, *width), np.float32))
            assert all(np.abs(filled).max() > 0 for filled in rows[row, 5 - fill :])
    stream.step(random_tokens(B, 1, 1))
    for name, rows in stream.memory().items():
        assert same_bits(rows[0, :5], memory[name][0]), "what was there has moved up by one row"


def test_memory_fill_and_snapshot_are_copies(models, kv):
    stream, untouched = models(kv).stream(), models(kv).stream()
    for other in (stream, untouched):
        other.feed(random_tokens(B, 9))
    snapshot = stream.snapshot()
    for array in (*stream.memory().values(), *snapshot.memory.values(), stream.fill, snapshot.fill):
        array[:] = 3
    assert same_state(stream, untouched)


@pytest.mark.parametrize("kind", ["kv", "kv, rolled", "hidden", "zeros", "zeros, rolled"])
def test_reset_of_everything_is_a_new_stream(models, kind):
    stream, new = models(kind).stream(), models(kind).stream()
    stream.feed(random_tokens(B, 9))
    stream.reset()
    for seed in range(3):
        assert same_state(stream, new)
        assert same_bits(stream.feed(random_tokens(B, 5, seed)), new.feed(random_tokens(B, 5, seed)))


@pytest.mark.parametrize("rows", [[1], 1, (1, 1), np.array([False, True, False])], ids=str)
@pytest.mark.parametrize("kind", ["kv", "kv, rolled", "hidden", "zeros", "zeros, rolled"])
def test_reset_of_one_stream_leaves_its_neighbours_alone(models, kind, rows):
    stream, new, undisturbed = (models(kind).stream() for _ in range(3))
    for other in (stream, undisturbed):
        other.feed(random_tokens(B, 6))
    stream.reset(rows)
    for seed in range(1, 4):
        tokens = random_tokens(B, 5, seed)
        found, fresh, expected = (other.feed(tokens) for other in (stream, new, undisturbed))
        assert same_bits(found[1], fresh[1])
        assert same_bits(found[[0, 2]], expected[[0, 2]])
    assert stream.fill.tolist() == [M, M, M]


@pytest.mark.parametrize("rows", [[], np.zeros(B, bool)], ids=["no index", "no True"])
def test_reset_of_nothing_changes_nothing(models, kv, rows):
    stream, undisturbed = models(kv).stream(), models(kv).stream()
    for other in (stream, undisturbed):
        other.feed(random_tokens(B, 5))
    stream.reset(rows)
    assert same_state(stream, undisturbed)


@pytest.mark.parametrize(
    ("rows", "means"),
    [
        ([2, 0, 1], [2, 0, 1]),
        ([1], [1]),
        ([0, 0, 2], [0, 0, 2]),
        ([2, 2], [2, 2]),
        (np.array([True, False, True]), [0, 2]),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["kv", "kv, rolled", "hidden", "zeros", "zeros, rolled"])
def test_select_makes_each_stream_continue_another(models, kind, rows, means):
    stream, original = models(kind).stream(), models(kind).stream()
    for other in (stream, original):
        other.feed(random_tokens(B, 9), [9, 5, 2])
    before = original.snapshot()
    stream.select(rows)
    assert stream.batch_size == len(means)
    assert stream.fill.tolist() == before.fill[means].tolist()
    for name, found in stream.memory().items():
        assert same_bits(found, before.memory[name][means][:, before.fill.max() - before.fill[means].max() :])
    tokens = random_tokens(B, 5, 1)
    assert_close(stream.feed(tokens[means]), original.feed(tokens)[means])


def test_select_can_grow_a_stream_up_to_the_batch_size_and_come_back(models, kv):
    stream, alone = models(kv).stream(1), models(kv).stream(1)
    for other in (stream, alone):
        other.feed(random_tokens(1, 5))
    stream.select([0, 0, 0])
    assert (stream.batch_size, stream.fill.tolist()) == (3, [5, 5, 5])
    stream.step(random_tokens(3, 1, 1), [0, 1, 1])
    stream.select([0])
    assert same_state(stream, alone)
    assert same_bits(stream.feed(random_tokens(1, 9, 2)), alone.feed(random_tokens(1, 9, 2)))


@pytest.mark.parametrize("kind", ["kv", "kv, rolled", "hidden", "zeros", "zeros, rolled"])
def test_what_counted_of_dropped_sequences_does_not_stay_behind(models, kind):
    """A segment of 4 of three sequences, then of 1 of one: a program of 1 token cannot count 4."""
    stream, alone = models(kind).stream(), models(kind).stream(1)
    tokens = random_tokens(B, 4)
    stream.step(tokens)
    alone.step(tokens[:1])
    stream.select([0])
    for seed in range(30):
        token = random_tokens(1, 1, seed)
        assert_close(stream.step(token), alone.step(token))
    assert stream.loop.fill[1:].tolist() == models(kind).stream().loop.fill[1:].tolist(), "nobody is there"


# --- snapshots ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_restore_goes_back_bit_for_bit(models, kind):
    stream = models(kind).stream()
    stream.feed(random_tokens(B, 9), [9, 3, 0])
    state = stream.snapshot()
    tokens = random_tokens(B, 10, 1)
    first = stream.feed(tokens)
    after = stream.snapshot()
    other = models(kind).stream()
    other.feed(random_tokens(B, 9, 2))
    for restored in (stream, other):
        restored.restore(state)
        assert same_bits(restored.fill, state.fill)
        assert same_bits(restored.feed(tokens), first)
        assert same_bits(restored.fill, after.fill)
        assert all(same_bits(rows, after.memory[name]) for name, rows in restored.memory().items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_loads_as_it_was(models, kind, tmp_path):
    stream = models(kind).stream(2)
    stream.feed(random_tokens(2, 9), [9, 3])
    state = stream.snapshot()
    path = tmp_path / "there is one.state"
    path.write_text("an older file is replaced")
    state.save(path)
    loaded = StreamState.load(path)
    assert loaded.model_id == state.model_id == models(kind).manifest.model_id
    assert loaded.batch_size == 2
    assert same_bits(loaded.fill, state.fill)
    assert loaded.memory.keys() == state.memory.keys()
    assert all(same_bits(loaded.memory[name], rows) for name, rows in state.memory.items())
    continued = models(kind).stream(2)
    continued.restore(loaded)
    assert same_bits(continued.feed(random_tokens(2, 5, 1)), stream.feed(random_tokens(2, 5, 1)))
    assert [child.name for child in tmp_path.iterdir()] == [path.name]


def with_first_entry(state: StreamState, change: Any) -> StreamState:
    name, rows = next(iter(state.memory.items()))
    return replace(state, memory=state.memory | {name: change(rows)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: replace(s, model_id="0" * 64), ["model 000000000000", "restore it in the model"]),
        (lambda s: replace(s, model_id=""), ["model unknown"]),
        (lambda s: replace(s, fill=s.fill[:2]), ["2 sequences, expected 3", "open a stream of as many"]),
        (lambda s: replace(s, fill=np.array([8, 5, 5], np.int32)), ["fill is [8, 5, 5]", "0 … 7"]),
        (lambda s: replace(s, fill=np.array([5, -1, 5], np.int32)), ["fill is [5, -1, 5]", "0 … 7"]),
        (lambda s: replace(s, fill=np.array([5, 6, 5], np.int32)), ["float32 [3, 5, 2, 8], expected float32 [3, 6,"]),
        (lambda s: replace(s, head=s.head[:2]), ["head is int32 [2], expected int32 [3]"]),
        (lambda s: replace(s, head=s.head[None]), ["head is int32 [1, 3]"]),
        (lambda s: replace(s, head=s.head + 0.5), ["head is float64 [3], expected int32 [3]"]),
        (lambda s: replace(s, memory={}), ["layers.00.key is absent", "same form of memory"]),
        (lambda s: with_first_entry(s, lambda rows: rows[:, 1:]), ["[3, 4, 2, 8], expected float32 [3, 5, 2, 8]"]),
        (lambda s: with_first_entry(s, lambda rows: rows.astype(np.float64)), ["float64 [3, 5, 2, 8]"]),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(models, kv, change, words):
    stream, undisturbed = models(kv).stream(), models(kv).stream()
    for other in (stream, undisturbed):
        other.feed(random_tokens(B, 5))
    with pytest.raises(UsageError) as caught:
        stream.restore(change(stream.snapshot()))
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert same_state(stream, undisturbed)


def test_a_state_of_another_model_is_refused(models, kv):
    with pytest.raises(UsageError, match="belongs to model"):
        models(kv).stream().restore(models("window").stream().snapshot())


def test_a_state_of_the_other_form_of_memory_is_refused(models, kv):
    state = models("hidden").stream().snapshot()
    assert state.model_id == models(kv).manifest.model_id, "the same model, kept differently"
    with pytest.raises(UsageError, match="restore a state of a bundle that keeps the same form of memory"):
        models(kv).stream().restore(state)


def written(path, data: bytes):
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path, data: written(path, data[: len(data) // 2]),
        lambda path, data: written(path, data[:-1]),
        lambda path, data: written(path, data[:5]),
        lambda path, data: written(path, b""),
        lambda path, data: written(path, b"not a state at all, but long enough to be one"),
        lambda path, data: written(path, data.replace(b"txl-deploy.state/1", b"txl-deploy.state/2")),
        lambda path, data: written(path, data.replace(b'"fill"', b'"fuel"')),
        lambda path, data: path.parent,
        lambda path, data: path.with_name("nothing here"),
    ],
    ids=["half", "a byte short", "five bytes", "empty", "text", "newer format", "no fill", "a folder", "missing"],
)
def test_a_file_that_is_no_saved_state_is_refused(models, kv, tmp_path, spoil):
    path = tmp_path / "some.state"
    models(kv).stream().snapshot().save(path)
    with pytest.raises(UsageError, match="expected a saved state"):
        StreamState.load(spoil(path, path.read_bytes()))


@pytest.mark.parametrize("file", ["weights.safetensors", "selftest.safetensors", "manifest.json"])
def test_another_file_of_the_project_is_no_saved_state(models, kv, file):
    with pytest.raises(UsageError, match="expected a saved state"):
        StreamState.load(models(kv).bundle.file(file))


def test_a_safetensors_file_of_a_dtype_numpy_lacks_is_no_saved_state(tmp_path):
    from safetensors.torch import save_file

    save_file({"fill": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "half.safetensors")
    with pytest.raises(UsageError, match="expected a saved state"):
        StreamState.load(tmp_path / "half.safetensors")


@pytest.mark.parametrize(
    ("place", "said"),
    [("no such folder/a.state", "there is no folder"), ("taken", "found a folder, expected a plain file")],
)
def test_a_state_that_cannot_be_written_leaves_nothing_behind(models, kv, tmp_path, place, said):
    (tmp_path / "taken").mkdir()
    with pytest.raises(TxlError, match=said) as told:
        models(kv).stream().snapshot().save(tmp_path / place)
    assert "partial" not in str(told.value)
    assert [child.name for child in tmp_path.rglob("*")] == ["taken"]
