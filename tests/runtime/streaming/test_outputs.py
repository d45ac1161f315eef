"""The softmax apart from the layers: the whole one's numbers, and no more of it computed than is asked for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from frozen import frozen
from txl_runtime import Model, load
from txl_runtime.bundle.tables import Program
from txl_runtime.host import softmax as outputs
from txl_runtime.host.engine import Engine
from txl_runtime.host.softmax import SplitSoftmax, open_output
from txl_runtime.streaming.outputs import WholeSoftmax

B = 2
WIDE = {
    "vocab_size": 2500,
    "cutoffs": (777, 1900),
    "d_model": 288,
    "d_embed": 288,
    "embedding_scale": 0.02,
    "n_head": 4,
    "n_layer": 1,
}
"""Several blocks of the matrix products, which no kept bundle has; two columns of words, as odd as real cutoffs are."""
ROWS = range(1, 71)


@pytest.fixture(scope="module", params=["ring", "clusters", "wide"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def models(make_bundle):
    """The loaded bundle of a kind."""
    opened: dict[str, Model] = {}

    def open_kind(kind: str, **options: Any) -> Model:
        key = repr((kind, options))
        if key not in opened:
            path = make_bundle(batch_size=3, config=WIDE, verify=False) if kind == "wide" else frozen(kind)
            opened[key] = load(path, **options)
        return opened[key]

    return open_kind


@dataclass
class Counting:
    """An engine that counts the calls of each program, and the rows they had."""

    backend: Engine
    calls: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    bound: Counter[str] = field(default_factory=Counter)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def bind(self, program: Program, inputs: Any, outputs: Any) -> Any:
        call = self.backend.bind(program, inputs, outputs)
        self.bound[program.name] += 1
        rows = len(next(iter(inputs.values())))

        def counted() -> None:
            self.calls[program.name] += 1
            self.rows[program.name] += rows
            call()

        return counted


def split(model: Model) -> tuple[SplitSoftmax, Counting]:
    counting = Counting(model.backend.engine)
    output = open_output("hidden", model.manifest, counting)
    assert isinstance(output, SplitSoftmax)
    return output, counting


def hidden(model: Model, rows: int, seed: int = 0) -> np.ndarray:
    width = model.manifest.config.d_model
    return np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)


def logprobs(output: Any, features: np.ndarray, vocabulary: int) -> np.ndarray:
    found = np.full((len(features), vocabulary), np.nan, np.float32)
    output.logprobs(features, found)
    return found


def ids_of(model: Model, cluster: int, count: int, seed: int = 0) -> np.ndarray:
    """Some words of a cluster, its first and last among them."""
    first, last = model.manifest.config.clusters[cluster]
    drawn = np.random.default_rng(seed).integers(first, last, count).astype(np.int32)
    drawn[0], drawn[-1] = first, last - 1
    return drawn


# --- the numbers --------------------------------------------------------------------------------------------------


def test_log_probabilities_are_put_together_from_head_and_tails(models, kind):
    model = models(kind)
    output, _ = split(model)
    ends = [0, *model.manifest.config.cutoffs, model.vocab_size]
    assert list(output.clusters) == list(pairwise(ends))
    features = hidden(model, 20)
    head, words = output.head(features).copy(), ends[1]
    assert head.shape == (20, words + len(output.clusters) - 1)
    expected = [head[:, :words]]
    for cluster in range(1, len(output.clusters)):
        tail = output.tail(features, cluster)
        assert tail.shape == (20, ends[cluster + 1] - ends[cluster])
        np.testing.assert_allclose(np.exp(tail.astype(np.float64)).sum(axis=1), 1, atol=1e-5)
        expected.append(tail + head[:, [words + cluster - 1]])
    found = logprobs(output, features, model.vocab_size)
    assert found.tobytes() == np.concatenate(expected, axis=1).tobytes()
    np.testing.assert_allclose(np.exp(found.astype(np.float64)).sum(axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("at_a_time", [1, 4, 7])
def test_log_probabilities_are_the_same_computed_some_rows_at_a_time(models, kind, at_a_time, monkeypatch):
    model = models(kind)
    output, _ = split(model)
    features = hidden(model, 9)
    expected = logprobs(output, features, model.vocab_size)
    monkeypatch.setattr(outputs, "CHUNK", at_a_time * model.vocab_size)
    assert logprobs(output, features, model.vocab_size).tobytes() == expected.tobytes()


@pytest.mark.parametrize("strided", [False, True])
def test_log_probabilities_go_where_they_are_wanted(models, kind, strided):
    model = models(kind)
    output, _ = split(model)
    features = hidden(model, 6)
    expected = logprobs(output, features, model.vocab_size)
    place = np.full((6, 2, model.vocab_size + 1), np.nan, np.float32)
    view = place[:, 1, :-1] if strided else place[:, 0][:, :-1]
    output.logprobs(features[::1], view)
    assert view.tobytes() == expected.tobytes()
    assert np.isnan(np.delete(place, 1 if strided else 0, axis=1)).all()
    assert np.isnan(place[..., -1]).all()


def test_nll_is_what_gathering_gives_bit_for_bit(models, kind):
    model = models(kind)
    output, _ = split(model)
    clusters = len(model.manifest.config.clusters)
    targets = np.concatenate([ids_of(model, cluster, 90) for cluster in range(clusters)])
    targets = np.random.default_rng(3).permutation(targets)
    features = hidden(model, len(targets))
    whole = logprobs(output, features, model.vocab_size)
    found = output.nll(features, targets)
    assert found.dtype == np.float32
    assert found.tobytes() == (-whole[np.arange(len(targets)), targets]).tobytes()


def test_whole_output_returns_what_it_is_given(models):
    model = models("ring")
    output = open_output("logprobs", model.manifest, Counting(model.backend.engine))
    assert isinstance(output, WholeSoftmax)
    given = np.random.default_rng(0).normal(size=(5, 41)).astype(np.float32)
    assert logprobs(output, given, 41).tobytes() == given.tobytes()
    assert output.head(given).tobytes() == given.tobytes()
    targets = np.array([0, 40, 7, 7, 30], np.int32)
    assert output.nll(given, targets).tobytes() == (-given[np.arange(5), targets]).tobytes()
    assert output.clusters == ((0, 41),)
    with pytest.raises(IndexError):
        output.tail(given, 1)


# --- a row does not depend on the others --------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"threads": 1}, {"lean": True}, {"lean": True, "threads": 1}], ids=str)
def test_what_a_row_gets_does_not_depend_on_how_many_there_are(models, kind, options):
    model = models(kind, **options)
    output, _ = split(model)
    features = hidden(model, ROWS[-1])
    parts = [output.head, *(lambda rows, c=c: output.tail(rows, c) for c in range(1, len(output.clusters)))]
    for number, part in enumerate(parts):
        whole = part(features).copy()
        for count in ROWS:
            assert part(features[:count]).tobytes() == whole[:count].tobytes(), f"part {number}, {count} rows"
            assert part(features[count - 1 : count]).tobytes() == whole[count - 1].tobytes(), f"part {number}, alone"


def test_a_row_of_nan_leaves_the_others_alone(models, kind):
    model = models(kind)
    output, _ = split(model)
    features = hidden(model, 7)
    expected = logprobs(output, features, model.vocab_size)
    targets = np.arange(7, dtype=np.int32) * (model.vocab_size // 7)
    nll = output.nll(features, targets)
    features[3] = np.nan
    found = logprobs(output, features, model.vocab_size)
    well = np.arange(7) != 3
    assert np.isnan(found[3]).all()
    assert found[well].tobytes() == expected[well].tobytes()
    assert output.nll(features, targets)[well].tobytes() == nll[well].tobytes()


def test_a_number_of_rows_is_bound_once_while_it_is_in_use(models):
    model = models("clusters")
    output, counting = split(model)
    features = hidden(model, 40)
    expected = output.head(features).copy()
    for _ in range(3):
        for count in (1, 2, 3, 40):
            assert output.head(features[:count]).tobytes() == expected[:count].tobytes()
    assert counting.bound == {"head": 4}
    for count in (*range(1, 31), *range(30, 0, -1)):  # more than are kept
        assert output.head(features[:count]).tobytes() == expected[:count].tobytes()
    assert counting.bound["head"] > 4
    more = hidden(model, 100, seed=1)  # arrays are made anew
    assert output.head(more)[:1].tobytes() == output.head(more[:1]).tobytes()
    assert output.head(features).tobytes() == expected.tobytes()


# --- only what is asked for ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("clusters", [[0], [1], [2], [0, 2], [1, 2], [0, 1, 2]], ids=str)
def test_clusters_without_targets_are_not_run(models, clusters):
    model = models("clusters")
    output, counting = split(model)
    targets = np.concatenate([ids_of(model, cluster, 4 + cluster) for cluster in clusters])
    output.nll(hidden(model, len(targets)), targets)
    tails = [cluster for cluster in clusters if cluster]
    assert counting.calls == {"head": 1} | {f"tail.{c}": 1 for c in tails}
    assert counting.rows == {"head": len(targets)} | {f"tail.{c}": 4 + c for c in tails}, "rows of their own alone"


def test_log_probabilities_run_every_part_once(models):
    output, counting = split(models("clusters"))
    logprobs(output, hidden(models("clusters"), 9), 256)
    assert counting.calls == {"head": 1, "tail.1": 1, "tail.2": 1}
    assert set(counting.rows.values()) == {9}


@pytest.fixture
def counted(models, monkeypatch):
    """A model whose streams count their calls."""
    model = models("clusters", threads=1)
    counting = Counting(model.backend.engine)
    monkeypatch.setattr(model, "backend", replace(model.backend, engine=counting))
    return model, counting


@pytest.mark.parametrize("cluster", [0, 1, 2])
def test_scoring_runs_the_tails_of_its_targets(counted, cluster):
    model, counting = counted
    tokens = np.stack([ids_of(model, cluster, 6, seed) for seed in range(B)])
    model.stream().score(tokens)
    expected = {"hidden-ring-4": 1, "hidden-ring-1": 1, "head": 2}
    assert counting.calls == expected | ({f"tail.{cluster}": 2} if cluster else {})
    assert counting.rows["head"] == 5 * B


def test_idle_sequences_cost_no_softmax(counted):
    model, counting = counted
    model.stream().feed(np.zeros((B, 9), int), [9, 0])
    assert counting.calls["hidden-ring-4"] == 2
    assert counting.calls["hidden-ring-1"] == 1
    assert counting.rows["head"] == counting.rows["tail.1"] == counting.rows["tail.2"] == 9


def test_generating_runs_the_softmax_for_drawn_tokens_alone_and_a_stream_counts_all_its_draws(counted):
    model, counting = counted
    stream = model.stream()
    assert len(list(stream.generate(np.ones((B, 11), int), 8, temperature=0))) == 8
    assert stream.draws.tokens == 8 * B
    assert counting.calls["head"] == 8, "the prompt needs none"
    assert stream.draws.tails == counting.calls["tail.1"] + counting.calls["tail.2"] < 2 * 8 * B
    counting.calls.clear()
    single = model.stream(1)
    for seed in range(3):
        list(single.generate(np.ones(2, int), 5, seed=seed))
    assert single.draws.tokens == 15
    before = single.draws.tails
    assert before <= 15, "one at most per draw at temperature 1"
    list(single.generate(np.ones(2, int), 4, temperature=2.0, seed=3))
    assert single.draws.tokens == 19
    assert before <= single.draws.tails <= before + 2 * 4
    assert single.draws.tails == counting.calls["tail.1"] + counting.calls["tail.2"] > 0
