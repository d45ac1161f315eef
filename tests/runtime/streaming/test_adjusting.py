"""Rows that are adjusted before a draw: grammars, biases, mixtures, and functions that fail."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from frozen import frozen
from grammars import LENGTHS, PITCHES, alternating, json_lines
from plain_draws import by_the_whole, log_softmax
from txl_runtime import Model, Stream, UsageError, load
from txl_runtime.streaming.adjusting import adjustment
from txl_runtime.streaming.outputs import DrawCount, WholeSoftmax
from txl_runtime.streaming.sampling import Sampler, draw

PROMPT = [[1, 70, 200, 9], [5, 6, 0, 0]]
COUNTS = [4, 2]
V = 256
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "hot": {"temperature": 1.7},
    "top-k": {"top_k": 100},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "both": {"top_k": 100, "top_p": 0.8},
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@pytest.fixture(scope="module")
def model() -> Model:
    """Two sequences; a softmax of three clusters."""
    return load(frozen("clusters"), backend="cpu", threads=1)


def generated(stream: Stream, count: int = 20, **options: Any) -> np.ndarray:
    return np.stack(list(stream.generate(PROMPT, count, lengths=COUNTS, **{"seed": 5} | options)), axis=1)


def memory(stream: Stream) -> list[bytes]:
    return [stream.fill.tobytes(), *(rows.tobytes() for rows in stream.memory().values())]


class Rows(WholeSoftmax):
    """Distributions as they are given."""

    def __init__(self, columns: int) -> None:
        self.clusters = ((0, columns),)


def drawn_by(allow: Any, draws: int, columns: int, **options: Any) -> list[int]:
    """Tokens of one sampler after random distributions, of which some are almost certain of one token."""
    sampler = Sampler(**{"seed": 3} | options, adjust=adjustment(columns, allow=allow))
    scores = np.random.default_rng(8).normal(size=(333, columns)) * np.array([[0.1], [3], [50]] * 111)
    rows, output, token = log_softmax(scores)[:, None], Rows(columns), np.zeros(1, np.int32)
    found = []
    for row in itertools.islice(itertools.cycle(rows), draws):
        assert not draw([sampler], output, row, token, DrawCount())
        found.append(int(token[0]))
    return found


# --- grammars -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"temperature": 2.5, "top_p": 0.9}])
def test_two_kinds_of_tokens_alternate_in_ten_thousand_draws(options):
    found = drawn_by(alternating, 10_000, 128, **options)
    assert set(found[::2]) <= set(PITCHES)
    assert set(found[1::2]) <= set(LENGTHS)
    assert len(set(found)) == len(PITCHES) + len(LENGTHS), "every token of the grammar comes"


def test_every_object_of_json_is_whole_in_ten_thousand_draws():
    lines = bytes(drawn_by(json_lines, 10_000, 128, temperature=1.5)).decode().split("\n")
    assert len(lines) > 100
    for line in lines[:-1]:
        assert isinstance(json.loads(line), dict)


def test_a_grammar_is_told_of_each_sequence_and_of_nothing_behind_its_end(model):
    told: list[np.ndarray] = []

    def note(tokens: np.ndarray) -> range:
        assert tokens.dtype == np.int32
        assert not tokens.flags.writeable
        told.append(tokens)
        return range(V)

    stops = generated(model.stream())[1, 2:3].tolist()
    found = generated(model.stream(), allow=note, stop_tokens=stops)
    lengths = [[*row].index(stops[0]) + 1 if stops[0] in row else len(row) for row in found]
    assert lengths[0] != lengths[1], "one sequence goes on alone"
    expected = [
        [*PROMPT[row][: COUNTS[row]], *found[row, :at].tolist()]
        for at in range(max(lengths))
        for row in range(2)
        if at < lengths[row]
    ]
    assert [tokens.tolist() for tokens in told] == expected


# --- draws --------------------------------------------------------------------------------------------------------


@ways
def test_a_row_that_stays_as_it_is_gives_the_same_tokens(model, way):
    expected, tails = generated(model.stream(), **way), []
    for options in (
        {},
        {"forbid": (), "logit_bias": {}, "allow": range(V)},
        {"adjust": lambda row, tokens: row},
        {"adjust": lambda row, tokens: row.astype(np.float32)},
    ):
        stream = model.stream()
        np.testing.assert_array_equal(generated(stream, **way, **options), expected)
        tails.append(stream.draws.tails)
    assert tails[1] == tails[0], "nothing was asked, and no more was computed"
    assert tails[2] == 2 * 20 * 2, "both further clusters of each draw"


@ways
def test_a_mixture_is_drawn_from_as_if_it_was_the_model(way):
    source = np.random.default_rng(2)
    other = log_softmax(source.normal(size=50))

    def mixed(row: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return np.logaddexp(np.log(0.3) + row, np.log(0.7) + other)

    sampler, uniforms = (Sampler(**{"seed": 4} | way, adjust=adjust) for adjust in (mixed, None))
    token = np.zeros(1, np.int32)
    for _ in range(200):
        row = log_softmax(source.normal(size=(1, 50)))
        assert not draw([sampler], Rows(50), row, token, DrawCount())
        uniform, cuts = uniforms.uniform(), (sampler.temperature, sampler.top_k, sampler.top_p)
        assert token[0] == by_the_whole(mixed(row[0].astype(np.float64), token), uniform, *cuts)


@ways
def test_a_bias_is_added_before_the_temperature(model, way):
    def add(row: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        row[[3, 250]] += [2.5, -100]
        return row

    expected = generated(model.stream(), adjust=add, **way)
    found = generated(model.stream(), logit_bias={3: 2.5, np.int64(250): -100}, **way)
    np.testing.assert_array_equal(found, expected)


def test_the_largest_bias_leaves_one_token_and_the_smallest_none(model):
    assert set(generated(model.stream(), logit_bias={77: 100}).ravel().tolist()) == {77}
    likely = set(generated(model.stream(), 100).ravel().tolist())
    assert not likely & set(generated(model.stream(), 100, logit_bias=dict.fromkeys(likely, -100)).ravel().tolist())


@ways
def test_what_is_forbidden_never_comes_whatever_brings_it_back(model, way):
    forbidden = sorted(set(generated(model.stream(), **way).ravel().tolist()))[::2]
    more = {"allow": lambda tokens: range(V), "logit_bias": dict.fromkeys(forbidden, 100)}
    for forbid in (forbidden, {*forbidden}, np.array(forbidden * 2)):
        for options in ({}, more, {"adjust": lambda row, tokens: np.zeros(V)}):
            assert not set(forbidden) & set(generated(model.stream(), forbid=forbid, **way, **options).ravel().tolist())


def test_log_probabilities_are_the_models_own(model):
    stream, expected = model.stream(), []
    generation = stream.generate(PROMPT, 5, lengths=COUNTS, seed=1, logprobs=True, allow=[7, 8, 9])
    found = [(token, generation.logprobs) for token in generation]
    plain = model.stream()
    row = plain.feed(PROMPT, COUNTS, last=True)
    for token, _ in found:
        expected.append(row[np.arange(2), token])
        row = plain.feed(token[:, None], last=True)
    np.testing.assert_allclose([logprobs for _, logprobs in found], expected, atol=1e-5)


# --- what is refused ----------------------------------------------------------------------------------------------


def filled(value: float, at: Any = slice(None)) -> Any:
    def adjust(row: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        row[at] = value
        return row

    return adjust


def failing(*given: Any) -> Any:
    raise KeyError("a rule")


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"adjust": lambda row, tokens: None}, r"adjust returned None, expected float64 or float32 \[256\]"),
    (
        {"adjust": lambda row, tokens: np.ma.masked_less(row, -3)},
        r"adjust returned .* expected float64 or float32 \[256\]",
    ),
    ({"adjust": lambda row, tokens: row[1:]}, r"adjust returned float64 \[255\], expected"),
    ({"adjust": lambda row, tokens: row.astype(int)}, r"adjust returned int64 \[256\], expected"),
    ({"adjust": filled(np.nan, 9)}, "adjust returned nan for token 9, expected a number, or -inf"),
    ({"adjust": filled(np.inf, 9)}, "adjust returned inf for token 9, expected a number, or -inf"),
    ({"adjust": filled(-np.inf)}, "no token may be drawn after 6 tokens: all log-probabilities are -inf, expected"),
    ({"adjust": failing}, r"adjust failed after 6 tokens \(KeyError: 'a rule'\), expected a result; mend it"),
    ({"allow": failing}, "allow failed after 6 tokens"),
    ({"allow": lambda tokens: None}, "what allow returned is None, expected a list of ids, 0 … 255 each"),
    ({"allow": lambda tokens: [256]}, r"what allow returned is \[256\], expected a list of ids"),
    ({"allow": lambda tokens: []}, "no token may be drawn after 6 tokens"),
    ({"allow": lambda tokens: [5], "forbid": [5]}, "no token may be drawn after 6 tokens"),
]


@pytest.mark.parametrize("way", [{}, {"temperature": 0}], ids=["plain", "greedy"])
@pytest.mark.parametrize(("options", "said"), FAULTS, ids=[said for _, said in FAULTS])
def test_a_function_that_fails_ends_the_generation_and_leaves_the_stream(model, options, said, way):
    (name,) = {"adjust", "allow"} & options.keys()
    right = {"adjust": lambda row, tokens: row, "allow": lambda tokens: range(V)}[name]

    def late(*given: Any) -> Any:
        return (options[name] if len(given[-1]) == 6 else right)(*given)

    stream, plain = model.stream(1), model.stream(1)
    generation = stream.generate(PROMPT[0], 9, seed=3, **way, **options | {name: late})
    found = [next(generation), next(generation)]
    with pytest.raises(UsageError, match=said):
        next(generation)
    assert list(generation) == []
    plain.feed([PROMPT[0]])
    for token in found:
        plain.feed(token[:, None])
    assert memory(stream) == memory(plain), "it holds the prompt and every yielded token"
    again = [list(each.generate(found[-1], 5, seed=1)) for each in (stream, plain)]
    np.testing.assert_array_equal(*again)


def test_no_random_number_is_used_where_the_function_fails():
    faults = iter([filled(np.nan), lambda row, tokens: row])
    sampler, other = Sampler(seed=1, adjust=lambda *given: next(faults)(*given)), Sampler(seed=1)
    row, token, expected = log_softmax(np.arange(9.0))[None], np.zeros(1, np.int32), np.zeros(1, np.int32)
    assert isinstance(draw([sampler], Rows(9), row, token, DrawCount())[0], UsageError)
    for one, into in ((sampler, token), (other, expected)):
        assert not draw([one], Rows(9), row, into, DrawCount())
    assert token == expected


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"forbid": [256]}, r"forbid is \[256\], expected a list of ids, 0 … 255 each"),
    ({"forbid": np.array([-1])}, r"forbid is array\(\[-1\]\), expected a list of ids"),
    ({"forbid": 5}, "forbid is 5, expected a list of ids"),
    ({"forbid": itertools.repeat(5)}, "forbid is repeat"),
    ({"forbid": "ab"}, "forbid is 'ab'"),
    ({"allow": ["a"]}, r"allow is \['a'\], expected a list of ids"),
    ({"allow": []}, r"allow is \[\] and forbid \(\), expected at least one of 256 tokens left to draw"),
    ({"allow": [3, 4], "forbid": [4, 3, 9]}, r"allow is \[3, 4\] and forbid \[4, 3, 9\], expected at least one"),
    ({"forbid": range(256)}, "expected at least one of 256 tokens left to draw"),
    ({"adjust": 3}, "adjust is 3, expected a function"),
    ({"logit_bias": [3]}, r"logit_bias is \[3\], expected numbers by token id"),
    ({"logit_bias": {256: 1}}, r"logit_bias is \[256\], expected a list of ids, 0 … 255 each"),
    ({"logit_bias": {"5": 1}}, r"logit_bias is \['5'\], expected a list of ids"),
    ({"logit_bias": {5: 100.1}}, "logit_bias is 100.1 for token 5, expected a number, -100 … 100"),
    ({"logit_bias": {5: float("nan")}}, "logit_bias is nan for token 5"),
    ({"logit_bias": {5: True}}, "logit_bias is True for token 5"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_makes_no_sense_is_refused_at_once(model, options, said):
    stream = model.stream()
    with pytest.raises(UsageError, match=said):
        stream.generate(PROMPT, 5, **options)
    assert not stream.fill.any()
