"""Draws from the best words of each part: the very tokens that the row gives, and the row where they do not suffice."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from plain_draws import log_softmax
from txl_runtime import BackendError
from txl_runtime.streaming.best_words import BestWords
from txl_runtime.streaming.outputs import DrawCount, WholeSoftmax
from txl_runtime.streaming.sampling import Sampler, draw, draw_all, draw_from

B, BEST = 3, 257
SIZES = {"plain": (2000,), "two tails": (500, 100, 1400), "small parts": (300, 20, 200, 900), "few words": (200, 50)}
SPREADS = {
    "flat": (0.3, 0.3, 0.0),
    "peaked": (3.0, 3.0, 1.0),
    "in tails": (1.0, 3.0, 6.0),
    "in the head": (3.0, 1.0, -8.0),
}


class Row(WholeSoftmax):
    """The softmax of a program that returns rows."""

    def __init__(self, columns: int) -> None:
        self.name, self.clusters = "logprobs", ((0, columns),)


class Next:
    """A program "next" for b distributions, worked out by NumPy; notes when its row is asked for.

    Of words that tie the last ones come first, which ONNX does not allow, but engines may do.
    """

    def __init__(
        self, parts: list[np.ndarray], clusters: np.ndarray, temperature: float, backwards: bool = False
    ) -> None:
        ends = np.cumsum([part.shape[1] for part in parts]).tolist()
        self.clusters = tuple(zip([0, *ends[:-1]], ends, strict=True))
        offsets = np.concatenate([np.zeros((len(clusters), 1), np.float32), clusters], axis=1)
        self.row = np.concatenate([part + offsets[:, [c]] for c, part in enumerate(parts)], axis=1)
        warm = np.maximum(np.float32(min(temperature, 3e38)), np.float32(1e-30))
        self.given: dict[str, np.ndarray] = {"clusters": clusters} if len(parts) > 1 else {}
        sums = []
        for c, (part, (first, _)) in enumerate(zip(parts, self.clusters, strict=True)):
            seen = part[:, ::-1] if backwards else part
            order = np.argsort(-seen, axis=1, kind="stable")[:, :BEST]
            name = f"tail.{c}" if c else "head"
            self.given[f"{name}.values"] = np.take_along_axis(seen, order, axis=1)
            at = part.shape[1] - 1 - order if backwards else order
            self.given[f"{name}.ids"] = (first + at).astype(np.int32)
            with np.errstate(over="ignore"):
                sums.append(np.exp((part - part.max(axis=1, keepdims=True)) / warm).sum(axis=1, dtype=np.float32))
        self.given["sums"] = np.stack(sums, axis=1)
        self.fetched = 0

    def parts(self) -> BestWords:
        return BestWords(self.clusters, self.given)

    def last(self) -> np.ndarray:
        self.fetched += 1
        return self.row


def distributions(words: tuple[int, ...], spread: tuple[float, float, float], seed: int, steps: float = 0.0) -> Any:
    """Random ones: the parts, and the further clusters; in steps, many words tie."""
    draws = np.random.default_rng(seed)
    scores = draws.normal(size=(B, words[0] + len(words) - 1)) * spread[0]
    scores[:, words[0] :] += spread[2]
    if steps:
        scores = np.round(scores / steps) * steps
    head = log_softmax(scores)
    tails = [draws.normal(size=(B, count)) * spread[1] for count in words[1:]]
    if steps:
        tails = [np.round(tail / steps) * steps for tail in tails]
    return [np.ascontiguousarray(head[:, : words[0]]), *map(log_softmax, tails)], head[:, words[0] :].copy()


def samplers(**options: Any) -> list[Sampler]:
    """One for each of B streams that have a seed in common."""
    return [Sampler(**options, stream=stream) for stream in range(B)]


def both(found: Next, options: dict[str, Any], draws: int) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens drawn from the parts and those drawn from the row, with the same random numbers."""
    rows = Row(found.row.shape[1])
    ours, theirs = (samplers(**options, seed=7) for _ in range(2))
    tokens = [], []
    for _ in range(draws):
        for live, kept in ((ours, tokens[0]), (theirs, tokens[1])):
            drawn = np.full(B, -1, np.int32)
            if live is ours:
                assert not draw_from(live, rows, found, drawn, DrawCount())
            else:
                assert not draw(live, rows, found.row, drawn, DrawCount())
            kept.append(drawn.tolist())
    return tokens[0], tokens[1]


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    **{f"top-k {k}": {"top_k": k} for k in (1, 2, 50, 255, 256)},
    **{f"top-p {p}": {"top_p": p} for p in (0.1, 0.5, 0.9, 0.99)},
    "cold top-p": {"temperature": 0.3, "top_p": 0.9},
    "cool top-p": {"temperature": 0.8, "top_p": 0.95},
    "hot top-p": {"temperature": 2.0, "top_p": 0.5},
    "hot top-k": {"temperature": 2.0, "top_k": 40},
    "almost greedy": {"temperature": 5e-324, "top_p": 0.9},
    "all alike": {"temperature": 1e300, "top_k": 5},
    "both": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "both, many": {"top_k": 256, "top_p": 0.99},
}
pairs = pytest.mark.parametrize(
    ("options", "words"), [*zip(OPTIONS.values(), itertools.cycle(SIZES.values())), (OPTIONS["both"], SIZES["plain"])]
)
"""Every way of drawing with one size, every size with some."""


@pytest.mark.parametrize("options", [OPTIONS["greedy"], OPTIONS["top-k 50"], OPTIONS["top-p 0.5"]])
def test_an_adjusted_row_is_drawn_from_where_parts_would_do(options):
    found = Next(*distributions(SIZES["two tails"], SPREADS["in tails"], 1), options.get("temperature", 1.0))
    best = found.row.argmax(axis=1).tolist()

    def barred(row: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        row[best] = -np.inf
        return row

    ours, theirs = both(found, {**options, "adjust": barred}, 20)
    assert ours == theirs
    assert not {token for tokens in ours for token in tokens} & {*best}


@pairs
def test_draws_from_parts_are_the_tokens_that_the_row_gives(words, options):
    """2,400 draws in all for each way of drawing, and not one that differs."""
    for spread in SPREADS.values():
        for seed in range(5):
            temperature = options.get("temperature", 1.0)
            found = Next(*distributions(words, spread, seed), temperature)
            ours, theirs = both(found, options, 10)
            assert ours == theirs, f"spread {spread}, seed {seed}"
            if options.get("top_p") is None:
                assert not found.fetched, "no row for the best, nor for as many of them as came"


@pairs
def test_words_that_tie_are_in_the_vocabulary_s_order_whatever_order_an_engine_has(words, options):
    for steps in (0.5, 2.0, 100.0):  # in the last all words of a part tie
        for seed in range(2):
            temperature = options.get("temperature", 1.0)
            found = Next(*distributions(words, SPREADS["peaked"], seed, steps), temperature, backwards=True)
            ours, theirs = both(found, options, 4)
            assert ours == theirs, f"steps {steps}, seed {seed}"


@pytest.mark.parametrize(
    ("options", "spread"),
    [
        ({}, "flat"),
        ({"temperature": 0.5}, "peaked"),
        ({"top_k": 257}, "in tails"),
        ({"top_k": 3000}, "in the head"),
        ({"top_p": 1.0}, "flat"),
    ],
)
def test_the_row_is_asked_for_where_parts_cannot_tell(spread, options):
    found = Next(*distributions(SIZES["plain"], SPREADS[spread], 0), options.get("temperature", 1.0))
    ours, theirs = both(found, options, 5)
    assert ours == theirs
    assert found.fetched == 5, "once a step, for all sequences that need it"


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}, {"top_k": 2}, {"top_p": 0.9}], ids=str)
def test_words_that_tie_in_the_row_alone_tie(options):
    """Added to their cluster's, two values that differ become one number: the first of the vocabulary is the better."""
    first = np.float32(-0.7)
    tail = np.full((B, 400), -30, np.float32)
    tail[:, 5], tail[:, 9] = first, np.nextafter(first, np.float32(0))
    head, clusters = np.full((B, 300), -60, np.float32), np.full((B, 1), -5, np.float32)
    found = Next([head, tail], clusters, options.get("temperature", 1.0))
    assert found.row[0, 305] == found.row[0, 309]
    ours, theirs = both(found, options, 10)
    assert ours == theirs


def test_a_nucleus_whose_last_word_is_a_close_call_needs_the_row():
    """The sums come in float32: what reaches p by less than their error is for the row to say."""
    parts, clusters = [np.full((B, 512), -60, np.float32)], np.zeros((B, 0), np.float32)
    parts[0][:, :2] = np.log(np.float32(0.5))
    found = Next(parts, clusters, 1.0)
    for share, fetched in ((0.5, True), (0.5 + 1e-6, True), (0.5 - 1e-4, False), (0.5 + 1e-4, False)):
        found.fetched = 0
        ours, theirs = both(found, {"top_p": share}, 3)
        assert ours == theirs
        assert bool(found.fetched) == fetched, share


def test_wrong_sums_within_what_is_allowed_change_nothing():
    for seed in range(20):
        found = Next(*distributions(SIZES["two tails"], SPREADS["peaked"], seed), 0.8)
        for error in (-9e-6, 9e-6):
            found.given["sums"] = (found.given["sums"] * np.float32(1 + error)).astype(np.float32)
            ours, theirs = both(found, {"temperature": 0.8, "top_p": 0.9}, 5)
            assert ours == theirs
            found.given["sums"] = (found.given["sums"] / np.float32(1 + error)).astype(np.float32)


def test_only_sequences_that_parts_leave_open_are_drawn_from_rows():
    flat, peaked = (distributions(SIZES["plain"], SPREADS[name], 0) for name in ("flat", "peaked"))
    found = Next([np.concatenate([flat[0][0][:1], peaked[0][0][1:]])], flat[1], 1.0)
    _, theirs = both(found, {"top_p": 0.6}, 1)
    found.row[1:] = np.nan  # whoever looks there is told
    tokens, count = np.full(B, -1, np.int32), DrawCount()
    assert not draw_from(samplers(top_p=0.6, seed=7), Row(2000), found, tokens, count)
    assert tokens.tolist() == theirs[0]
    assert count.tokens == B


def test_an_idle_sequence_draws_nothing_and_keeps_its_random_numbers():
    found = Next(*distributions(SIZES["two tails"], SPREADS["peaked"], 1), 1.0)
    always, paused = (samplers(top_k=40, seed=5) for _ in range(2))
    expected, tokens = [], np.full(B, -1, np.int32)
    for _ in range(3):
        draw_from(always, Row(2000), found, tokens, DrawCount())
        expected.append(tokens.tolist())
    drawn = np.full(B, -1, np.int32)
    draw_from([paused[0], None, paused[2]], Row(2000), found, drawn, DrawCount())
    assert drawn.tolist() == [expected[0][0], -1, expected[0][2]]
    draw_from(paused, Row(2000), found, drawn, DrawCount())
    assert drawn.tolist() == [expected[1][0], expected[0][1], expected[1][2]]


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"top_k": 50}, {"top_p": 0.9}, {"temperature": 2.0}], ids=str
)
def test_a_sequence_that_produced_nan_is_refused_by_name(options):
    found = Next(*distributions(SIZES["two tails"], SPREADS["peaked"], 1), 1.0)
    found.given["sums"][1, 2] = np.nan
    live, tokens = samplers(**options, seed=1), np.full(B, -1, np.int32)
    failed = draw_from(live, Row(2000), found, tokens, DrawCount())
    assert [(row, str(error)) for row, error in failed.items()] == [
        (1, "stream 1 produced NaN, expected log-probabilities; reset the stream")
    ]
    assert (tokens >= 0).tolist() == [True, False, True], "its neighbours are given theirs"
    with pytest.raises(BackendError, match=r"stream 1 produced NaN.*reset the stream"):
        draw_all(live, np.ones(B, bool), Row(2000), found, tokens, DrawCount())
    draw_all(live, np.array([True, False, True]), Row(2000), found, tokens, DrawCount())


def test_sequences_with_settings_of_their_own_are_given_what_each_alone_is_given():
    kinds = list(OPTIONS.values())
    for seed in range(30):
        temperature = 1.0
        found = Next(*distributions(SIZES["two tails"], SPREADS["peaked"], seed), temperature)
        chosen = [{**kinds[(seed + 5 * row) % len(kinds)], "temperature": temperature} for row in range(B)]
        mixed = [Sampler(**options, seed=seed + row) for row, options in enumerate(chosen)]
        mixed[seed % B] = Sampler(0.0)
        drawn = np.full(B, -1, np.int32)
        assert not draw_from(mixed, Row(2000), found, drawn, DrawCount())
        for row in range(B):
            alone: list[Sampler | None] = [None] * B
            alone[row] = Sampler(0.0) if row == seed % B else Sampler(**chosen[row], seed=seed + row)
            own = np.full(B, -1, np.int32)
            assert not draw_from(alone, Row(2000), found, own, DrawCount())
            assert own.tolist() == [drawn[row] if other == row else -1 for other in range(B)]
