"""Draws: the distribution worked out by hand, and lazily the very tokens the whole distribution would give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from plain_draws import by_the_whole, log_softmax
from txl_runtime import BackendError
from txl_runtime.streaming import sampling
from txl_runtime.streaming.outputs import DrawCount
from txl_runtime.streaming.sampling import Sampler

DEFAULTS = {"temperature": 1.0, "top_k": None, "top_p": None, "seed": 1, "streams": 1}


def samplers(streams: int, **options: Any) -> list[Sampler]:
    """One for each of some streams that have a seed in common."""
    return [Sampler(**options, stream=stream) for stream in range(streams)]


class Known:
    """An `Output` whose distributions are given, one per stream, and which notes what it is asked for.

    Features are the number of the stream.
    """

    def __init__(self, heads: np.ndarray, tails: dict[int, np.ndarray] | None = None) -> None:
        tails = tails or {}
        sizes = [heads.shape[1] - len(tails), *(tails[c].shape[1] for c in sorted(tails))]
        ends = np.cumsum(sizes).tolist()
        self.clusters = tuple(zip([0, *ends[:-1]], ends, strict=True))
        self.heads, self.tails = heads, tails
        self.asked: list[tuple[int, int]] = []  # stream and cluster of each tail computed

    @property
    def features(self) -> np.ndarray:
        return np.arange(len(self.heads), dtype=np.float32)[:, None]

    def head(self, features: np.ndarray) -> np.ndarray:
        return self.heads[features[:, 0].astype(int)]

    def tail(self, features: np.ndarray, cluster: int) -> np.ndarray:
        self.asked += [(int(stream), cluster) for stream in features[:, 0]]
        return self.tails[cluster][features[:, 0].astype(int)]

    def logprobs(self, features: np.ndarray, out: np.ndarray) -> None:
        raise AssertionError("a draw must not ask for the whole distribution")

    def nll(self, features: np.ndarray, targets: np.ndarray) -> np.ndarray:
        raise AssertionError("a draw has no targets")

    def whole(self, stream: int) -> np.ndarray:
        """Log-probabilities of the vocabulary, float64."""
        head, words = self.heads[stream].astype(np.float64), self.clusters[0][1]
        tails = [head[words + c - 1] + self.tails[c][stream].astype(np.float64) for c in sorted(self.tails)]
        return np.concatenate([head[:words], *tails])


def draw(
    samplers: list[Sampler], output: Known, count: DrawCount | None = None, running: list[bool] | None = None
) -> list[int]:
    """One token for every stream; -1 for those that are not running."""
    tokens = np.full(len(output.heads), -1, np.int32)
    live = [sampler if running is None or running[row] else None for row, sampler in enumerate(samplers)]
    for error in sampling.draw(live, output, output.features, tokens, DrawCount() if count is None else count).values():
        raise error
    return tokens.tolist()


# --- one cluster, worked out by hand ------------------------------------------------------------------------------

PROBABILITIES = np.array([0.05, 0.4, 0.02, 0.3, 0.13, 0.1])
BY_HAND = Known(np.log(PROBABILITIES)[None].astype(np.float32))


def heated(temperature: float) -> np.ndarray:
    powers = PROBABILITIES ** (1 / temperature)
    return powers / powers.sum()


def kept(probabilities: np.ndarray, tokens: list[int]) -> np.ndarray:
    chosen = np.zeros_like(probabilities)
    chosen[tokens] = probabilities[tokens]
    return chosen / chosen.sum()


# The same words behind an adaptive softmax: two in the head, one cluster of one and one of three.
HEAD = np.log(np.array([[0.05, 0.4, 0.02, 0.53]])).astype(np.float32)
TAILS = {1: np.zeros((1, 1), np.float32), 2: np.log(np.array([[0.3, 0.13, 0.1]]) / 0.53).astype(np.float32)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, PROBABILITIES),
        ({"temperature": 0.5}, heated(0.5)),
        ({"temperature": 3.0}, heated(3.0)),
        ({"top_k": 3}, kept(PROBABILITIES, [1, 3, 4])),
        ({"top_k": 100}, PROBABILITIES),
        ({"top_p": 0.71}, kept(PROBABILITIES, [1, 3, 4])),
        ({"top_p": 0.69}, kept(PROBABILITIES, [1, 3])),
        ({"top_p": 0.001}, kept(PROBABILITIES, [1])),
        ({"top_p": 1.0}, PROBABILITIES),
        # The three kept by top-k have 0.4/0.83 and 0.3/0.83, which already reach 0.8; with all six they do not.
        ({"top_k": 3, "top_p": 0.8}, kept(PROBABILITIES, [1, 3])),
        ({"top_p": 0.8}, kept(PROBABILITIES, [1, 3, 4])),
        # The temperature comes first: at 0.5 the two best hold 0.87.
        ({"temperature": 0.5, "top_p": 0.85}, kept(heated(0.5), [1, 3])),
        ({"temperature": 0.5, "top_k": 2}, kept(heated(0.5), [1, 3])),
    ],
    ids=str,
)
def test_draws_follow_the_distribution_worked_out_by_hand(options, expected):
    for output, draws in ((BY_HAND, 5_000), (Known(HEAD, TAILS), 2_500)):
        sampler = samplers(**DEFAULTS | options)
        counts = np.bincount([draw(sampler, output)[0] for _ in range(draws)], minlength=len(expected))
        assert ((counts > 0) == (expected > 0)).all(), "exactly the tokens that may be drawn are"
        spread = np.sqrt(expected * (1 - expected) / draws)
        assert (np.abs(counts / draws - expected) <= 5 * spread).all(), f"{counts / draws} against {expected}"


@pytest.mark.parametrize("output", [BY_HAND, Known(HEAD, TAILS)], ids=["one cluster", "three"])
def test_a_temperature_close_to_zero_is_greedy(output):
    for temperature in (1e-3, 1e-30, 5e-324):
        sampler = samplers(**DEFAULTS | {"temperature": temperature})
        assert {draw(sampler, output)[0] for _ in range(20)} == {1}


# --- adaptive softmax: the same tokens as with the whole distribution ---------------------------------------------

WORDS = (10, 12, 1, 9)  # of the clusters
STREAMS = 3


def adaptive(seed: int, head_spread: float, tail_spread: float, towards: float = 0.0) -> Known:
    """Random distributions, flat or peaked, whose further clusters are favoured by some nats."""
    draws = np.random.default_rng(seed)
    scores = draws.normal(size=(STREAMS, WORDS[0] + len(WORDS) - 1)) * head_spread
    scores[:, WORDS[0] :] += towards
    tails = {c: log_softmax(draws.normal(size=(STREAMS, WORDS[c])) * tail_spread) for c in range(1, len(WORDS))}
    return Known(log_softmax(scores), tails)


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 2.5},
    "the best": {"top_k": 1},
    "top-k": {"top_k": 5},
    "top-k of more than there are": {"top_k": 100},
    "cold top-k": {"temperature": 0.5, "top_k": 7},
    "top-p": {"top_p": 0.9},
    "small top-p": {"top_p": 0.2},
    "top-p of almost all": {"top_p": 0.9999},
    "hot top-p": {"temperature": 1.7, "top_p": 0.8},
    "both": {"top_k": 12, "top_p": 0.7},
    "cold, both": {"temperature": 0.6, "top_k": 12, "top_p": 0.7},
}
SHAPES = {  # spread of the head's scores, of the tails', and how much the further clusters are favoured
    "flat": (0.2, 0.2, 0.0),
    "peaked head": (6.0, 0.5, 0.0),
    "peaked tails": (0.5, 6.0, 2.0),
    "all in tails": (0.5, 1.0, 8.0),
    "nothing in tails": (1.0, 1.0, -12.0),
    "mixed": (2.0, 2.0, 1.0),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
PAIRS = [(options, shape) for n, options in enumerate(OPTIONS.values()) for shape in [*SHAPES.values()][n % 2 :: 2]]
some_options = pytest.mark.parametrize(
    "options", [OPTIONS[name] for name in ("greedy", "cold", "top-k", "top-p", "both")]
)


@pytest.mark.parametrize(("options", "shape"), PAIRS)
def test_lazy_draws_are_the_tokens_that_the_whole_distribution_gives(options, shape):
    cut = {"temperature": 1.0, "top_k": None, "top_p": None} | options
    for seed in range(20):
        output, count = adaptive(seed, *shape), DrawCount()
        sampler = samplers(**DEFAULTS | options | {"seed": seed, "streams": STREAMS})
        draws = [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(STREAMS)]
        for number in range(1, 6):
            found = draw(sampler, output, count)
            random = [0.0 if cut["temperature"] == 0 else generator.random() for generator in draws]
            assert found == [by_the_whole(output.whole(i), random[i], **cut) for i in range(STREAMS)], f"seed {seed}"
            assert count == DrawCount(tokens=STREAMS * number, tails=len(output.asked))
        per_draw = 5 * STREAMS * len(output.tails)
        assert len(output.asked) <= per_draw, "no tail is computed twice for one draw"


@shapes
def test_a_nucleus_larger_than_what_is_sorted_first_is_the_same(shape, monkeypatch):
    monkeypatch.setattr(sampling, "FEW", 2)
    for options in ({"top_p": 0.9}, {"top_p": 1.0}, {"top_p": 0.6, "temperature": 1.7}):
        test_lazy_draws_are_the_tokens_that_the_whole_distribution_gives(options, shape)


def needed_by_greedy(output: Known, stream: int) -> list[int]:
    """Clusters from the most probable on, as long as one could hold a better word than is known."""
    head, words = output.heads[stream].astype(np.float64), output.clusters[0][1]
    best, needed = head[:words].max(), []
    for cluster in sorted(output.tails, key=lambda c: -head[words + c - 1]):
        if head[words + cluster - 1] > best:
            needed.append(cluster)
            best = max(best, head[words + cluster - 1] + float(output.tails[cluster][stream].max()))
    return needed


@shapes
def test_greedy_computes_only_tails_that_could_hold_the_best_word(shape):
    found = set()
    for seed in range(40):
        output = adaptive(seed, *shape)
        draw(samplers(**DEFAULTS | {"temperature": 0, "streams": STREAMS}), output)
        expected = [(stream, cluster) for stream in range(STREAMS) for cluster in needed_by_greedy(output, stream)]
        assert output.asked == expected
        found.add(len(expected))
    assert max(found) < STREAMS * len(output.tails) or shape == SHAPES["flat"]


@shapes
def test_a_plain_draw_computes_a_tail_only_to_draw_from_it(shape):
    seen = set()
    for seed in range(60):
        output = adaptive(seed, *shape)
        tokens = draw(samplers(**DEFAULTS | {"seed": seed, "streams": STREAMS}), output)
        ends = [last for _, last in output.clusters]
        drawn = [(stream, int(np.searchsorted(ends, token, side="right"))) for stream, token in enumerate(tokens)]
        assert output.asked == [(stream, cluster) for stream, cluster in drawn if cluster]
        seen |= {cluster for _, cluster in drawn}
    assert seen >= {"all in tails": {1, 2, 3}, "nothing in tails": {0}}.get(
        next(name for name, values in SHAPES.items() if values == shape), set()
    )


def known(*head: float) -> Known:
    """One stream, whose last two entries of the head are clusters of two words each."""
    tails = {1: np.log([[0.5, 0.5]]).astype(np.float32), 2: np.log([[0.25, 0.75]]).astype(np.float32)}
    return Known(np.log(np.array([head])).astype(np.float32), tails)


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_k": 3, "temperature": 2.0}, {"top_k": 3, "top_p": 0.5}])
def test_top_k_computes_no_tail_of_a_cluster_below_the_words_it_keeps(options):
    # p of words: 0.3, 0.2, 0.15, 0.05; of clusters: 0.14 and 0.16 – which three are best is known with the second.
    output = known(0.3, 0.2, 0.15, 0.05, 0.14, 0.16)
    sampler = samplers(**DEFAULTS | options)
    for _ in range(20):
        output.asked.clear()
        assert draw(sampler, output)[0] in (0, 1, 2)
        assert output.asked == [(0, 2)]


@pytest.mark.parametrize(
    ("top_p", "asked"), [(0.2, []), (0.3, []), (0.49, []), (0.51, [2]), (0.66, [2, 1]), (1.0, [2, 1])]
)
def test_top_p_computes_tails_until_the_words_above_the_others_reach_it(top_p, asked):
    output = known(0.3, 0.2, 0.15, 0.05, 0.14, 0.16)
    draw(samplers(**DEFAULTS | {"top_p": top_p}), output)
    assert [cluster for _, cluster in output.asked] == asked


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.25, 3.0])
def test_a_draw_at_a_temperature_computes_tails_only_where_bounds_leave_the_word_open(temperature):
    # p of words: 0.6, 0.3; of clusters: 0.02 and 0.08
    output = known(0.6, 0.3, 0.02, 0.08)
    sampler, needed = samplers(**DEFAULTS | {"temperature": temperature}), 0
    draws = np.random.default_rng(np.random.SeedSequence(1).spawn(1)[0])
    for _ in range(200):
        output.asked.clear()
        uniform = draws.random()
        assert draw(sampler, output) == [by_the_whole(output.whole(0), uniform, temperature, None, None)]
        powers = np.exp(output.heads[0].astype(np.float64) / temperature)
        even = powers[2:] * 2 ** (1 - 1 / temperature)
        totals = powers[:2].sum() + np.array([bound(powers[2:], even).sum() for bound in (np.minimum, np.maximum)])
        words = np.searchsorted(np.cumsum(powers[:2]), uniform * totals, side="right").tolist()
        assert bool(output.asked) == (words[0] != words[1] or words[0] == 2)
        needed += bool(output.asked)
    assert 0 < needed < 100


def test_top_p_at_a_temperature_computes_no_tail_of_clusters_too_small_to_matter():
    output = adaptive(0, *SHAPES["nothing in tails"])
    draw(samplers(**DEFAULTS | {"temperature": 1.1, "top_p": 0.5, "streams": STREAMS}), output)
    assert output.asked == []


# --- ties ---------------------------------------------------------------------------------------------------------

QUARTER, HALF = np.float32(np.log(0.25)), np.float32(np.log(0.5))
TIES: dict[str, Known] = {
    # words and clusters of the head, then the tails; powers of two, so that sums are exact
    "two words": Known(np.array([[QUARTER, HALF, HALF, -90]], np.float32)),
    "a word and a cluster's word": Known(
        np.array([[2 * HALF, HALF, 2 * HALF, HALF]], np.float32), {1: np.zeros((1, 1), np.float32)}
    ),
    "words of two tails, the later cluster more probable": Known(
        np.array([[8 * HALF, 2 * HALF, HALF]], np.float32),
        {1: np.array([[HALF, HALF]], np.float32), 2: np.array([[2 * HALF, 2 * HALF, HALF * 2]], np.float32)},
    ),
    "a whole cluster that is one word, beside a better cluster's": Known(
        np.array([[8 * HALF, 2 * HALF, HALF]], np.float32),
        {1: np.zeros((1, 1), np.float32), 2: np.array([[HALF, HALF, HALF]], np.float32)},
    ),
}


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}, {"top_k": 1, "temperature": 3.0}], ids=str)
@pytest.mark.parametrize("output", TIES.values(), ids=TIES)
def test_of_words_that_tie_the_first_of_the_vocabulary_is_taken(output, options):
    values = output.whole(0)
    assert (values == values.max()).sum() > 1
    assert draw(samplers(**DEFAULTS | options), output) == [int(values.argmax())]


# --- what several streams have to do with each other --------------------------------------------------------------


@some_options
def test_an_idle_stream_draws_nothing_and_keeps_its_random_numbers(options):
    output = adaptive(3, *SHAPES["mixed"])
    always = samplers(**DEFAULTS | options | {"seed": 5, "streams": STREAMS})
    paused = samplers(**DEFAULTS | options | {"seed": 5, "streams": STREAMS})
    expected = [draw(always, output) for _ in range(6)]
    count = DrawCount()
    output.asked.clear()
    found = [draw(paused, output, count, [True, False, True]) for _ in range(3)]
    assert [row[1] for row in found] == [-1] * 3
    assert count.tokens == 6
    assert 1 not in {stream for stream, _ in output.asked}
    later = draw(paused, output)
    assert [row[0] for row in found] + [later[0]] == [row[0] for row in expected[:4]]
    assert later[1] == expected[0][1], "its first draw comes when it first runs"


@shapes
def test_streams_with_settings_of_their_own_draw_what_each_alone_draws(shape):
    """All of them with one call of the head."""
    kinds = list(OPTIONS.values())
    for seed in range(40):
        chosen = [kinds[(seed + 5 * row) % len(kinds)] for row in range(STREAMS)]
        output = adaptive(seed, *shape)
        together = draw([Sampler(**options, seed=seed + row) for row, options in enumerate(chosen)], output)
        for row, options in enumerate(chosen):
            alone: list[Any] = [
                Sampler(**options, seed=seed + row) if other == row else None for other in range(STREAMS)
            ]
            assert draw(alone, output, running=[other == row for other in range(STREAMS)])[row] == together[row]


def test_a_seed_gives_the_draws_that_it_always_gave():
    """Children of a seed are told by their numbers, as `SeedSequence.spawn` tells them."""
    children = [np.random.default_rng(child) for child in np.random.SeedSequence(11).spawn(3)]
    expected = [[child.random() for _ in range(4)] for child in children]
    assert [[sampler.uniform() for _ in range(4)] for sampler in samplers(3, seed=11)] == expected


# --- NaN ----------------------------------------------------------------------------------------------------------


@some_options
def test_a_stream_that_produced_nan_is_refused_by_name(options):
    heads = np.log(np.stack([PROBABILITIES] * 2)).astype(np.float32)
    heads[1, 2] = np.nan
    sampler = samplers(**DEFAULTS | options | {"streams": 2})
    with pytest.raises(BackendError, match=r"stream 1 produced NaN.*reset the stream"):
        draw(sampler, Known(heads))
    output, tokens = Known(heads), np.full(2, -1, np.int32)
    assert list(sampling.draw(sampler, output, output.features, tokens, DrawCount())) == [1]
    assert tokens[0] >= 0, "its neighbour is given one"


@some_options
def test_a_stream_that_does_not_run_may_hold_nan(options):
    heads = np.log(np.stack([PROBABILITIES] * 2)).astype(np.float32)
    heads[1] = np.nan
    sampler = samplers(**DEFAULTS | options | {"streams": 2})
    assert draw(sampler, Known(heads), running=[True, False])[1] == -1


@some_options
def test_a_tail_of_nan_is_refused_by_name_when_it_is_needed(options):
    output = adaptive(0, *SHAPES["all in tails"])
    for tail in output.tails.values():
        tail[1, 0] = np.nan
    sampler = samplers(**DEFAULTS | options | {"streams": STREAMS})
    with pytest.raises(BackendError, match=r"stream 1 produced NaN.*reset the stream"):
        draw(sampler, output)
