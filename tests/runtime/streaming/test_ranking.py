"""Hypotheses over a shared context: any number of them, each as if it were alone, and no state is touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frozen import frozen
from stand_ins.steps import looking, speaking, write
from step_models import VOCABULARY, counting, recurrent
from txl_runtime import Model, StreamState, UsageError, load

NBEST = ["it is the first", "it is defers", "€", "", "a", "it is the first", "b" * 40]


@pytest.fixture(scope="module")
def model() -> Model:
    return load(frozen("clusters"), backend="cpu", threads=1)


def by_hand(model: Model, before: str, hypothesis: str) -> float:
    """Return the cost of a text behind a context, in a stream of its own."""
    whole, context = (model.vocabulary.encode(text) for text in (before + hypothesis, before))
    return float(model.stream(1).score(whole[None])[0, len(context) - 1 :].sum(dtype=np.float64))


def test_more_hypotheses_than_sequences_cost_what_each_costs_alone(model):
    found = model.rank("He said: ", NBEST)
    assert found.shape == (7,)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, [by_hand(model, "He said: ", text) for text in NBEST], rtol=1e-5)
    alone = [model.rank("He said: ", [text]).item() for text in NBEST]
    np.testing.assert_allclose(found, alone, rtol=1e-5)
    assert found[3] == 0
    assert found[0] == found[5]
    assert model.rank("He said: ", NBEST[::-1]).tolist() == pytest.approx(found[::-1].tolist(), rel=1e-5)


@pytest.mark.parametrize("saved", ["taken", "snapshot", "bytes"])
def test_a_state_stands_before_the_context_and_stays_what_it_is(model, saved):
    stream = model.stream()
    stream.feed(["abc", "earlier still"])
    before = stream.snapshot()
    state: Any = stream.take(1)
    state = {"taken": state, "snapshot": state.snapshot(), "bytes": StreamState.from_bytes(state.to_bytes())}[saved]
    found = model.rank(" - ", NBEST, state=state)
    alone = model.stream(1)
    for text, cost in zip(NBEST, found, strict=True):
        alone.put(0, state)
        alone.feed(" -")
        tokens = model.vocabulary.encode(" " + text)
        assert cost == pytest.approx(alone.score(tokens[None]).sum(), rel=1e-5)
    after = stream.snapshot()
    assert all(after.memory[name].tobytes() == rows.tobytes() for name, rows in before.memory.items())
    assert (np.abs(found - model.rank(" - ", NBEST)) > 1e-3).sum() > 4, "the state matters"


def test_tokens_are_as_good_as_text(model):
    ids = [model.vocabulary.encode(text) for text in NBEST]
    expected = model.rank("ab", NBEST).tolist()
    assert model.rank(model.vocabulary.encode("ab"), ids).tolist() == expected
    assert model.rank([97, 98], [row.tolist() for row in ids]).tolist() == expected
    assert model.rank("ab", np.array([[97, 98], [98, 99]])).tolist() == model.rank("ab", ["ab", "bc"]).tolist()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a", []), r"hypotheses are \[\], expected a list of them, at least one"),
        (("a", "text"), "hypotheses are 'text', expected a list of them"),
        (("a", None), "hypotheses are None, expected a list of them"),
        (("", ["a"]), "the context is empty, expected at least one token for the hypotheses to go on from"),
        (([], ["a"]), "the context is empty"),
        ((["a", "b"], ["a"]), r"context tokens are <U1, expected whole numbers; encode text"),
        (("a", ["a", [1, 256]]), r"tokens of hypothesis 1 hold id 256 at \[0, 1\], expected 0 … 255"),
        (("a", ["a", [[1], [1, 2]]]), "tokens of hypothesis 1 have rows of different lengths"),
        (("a", ["a", [[1, 2]]]), r"tokens of hypothesis 1 have shape \[1, 1, 2\], expected \[1, T\]"),
        (("a", ["a", 5]), r"tokens of hypothesis 1 have shape \[1\], expected \[1, T\]"),
        (("a", ["a"], "state"), "the state is a str, expected what Stream.take returned, or a StreamState of one"),
    ],
)
def test_what_cannot_be_ranked_is_refused(model, arguments, said):
    with pytest.raises(UsageError, match=said):
        model.rank(*arguments)


def test_a_bundle_without_a_vocabulary_ranks_tokens_and_refuses_text(tmp_path):
    model = load(write(counting(), tmp_path / "own.txl"), backend="cpu", threads=1)
    with pytest.raises(UsageError, match=r"tokens are text \('a'\), but the bundle has no vocabulary"):
        model.rank("a", [[1]])
    assert model.rank([1, 2], [[3], [4, 5]]).shape == (2,)


@pytest.mark.parametrize(
    "made",
    [
        counting,
        lambda: speaking(("L", "B")),
        lambda: speaking(("B",), (1,)),
        lambda: speaking(("B", "L"), streams="lockstep"),
    ],
    ids=["counting", "time first", "one by one", "lockstep"],
)
def test_whatever_the_layout_and_in_lockstep_each_costs_what_it_costs_alone(tmp_path, made):
    model = load(write(made(), tmp_path / "own.txl"), backend="cpu", threads=1)
    draws = np.random.default_rng(0)
    told = [draws.integers(0, VOCABULARY, size) for size in (3, 1, 7, 2, 5)]
    context = np.array([1, 2, 3, 2, 1])
    found = model.rank(context, told)
    for ids, cost in zip(told, found, strict=True):
        stream = model.stream()
        whole = np.repeat(np.concatenate([context, ids])[None], stream.batch_size, axis=0)
        assert cost == pytest.approx(stream.score(whole)[0, len(context) - 1 :].sum(), abs=1e-5)


def test_a_model_without_log_probabilities_says_why(tmp_path):
    for made, said in (
        (looking, "score takes token ids alone, but this model reads"),
        (recurrent, "score takes token ids"),
    ):
        with pytest.raises(UsageError, match=said):
            load(write(made(), tmp_path / f"{made.__name__}.txl"), backend="cpu", threads=1).rank([1], [[1]])
