"""Sequences stepped through the model inside Triton, beside streams of their own; the server is a stand-in."""

from __future__ import annotations

import numpy as np
import pytest
import txl_runtime
from stand_ins import triton_server
from stand_ins.triton_server import Request
from step_models import counting, growing, recurrent

from txl_deploy.triton.inside import stepping
from txl_deploy.triton.inside.stepping import Stepping


@pytest.fixture
def model(tmp_path):
    return txl_runtime.load(counting().write(tmp_path / "counting.txl"), backend="cpu")


def tokens(ids, **more):
    return Request(inputs={"tokens": np.array([ids], np.int32)}, **more)


def cuts(draws, ids):
    """The ids in pieces of random lengths."""
    while len(ids):
        length = int(draws.integers(1, 8))
        yield ids[:length]
        ids = ids[length:]


@pytest.mark.parametrize("wanted", [("logits", "next"), ("last", "next")])
def test_sequences_that_meet_get_what_each_gets_alone(model, wanted):
    """Seven sequences on three rows, requests of random lengths, random ones together."""
    draws = np.random.default_rng(0)
    served = Stepping(model, 7, triton_server)
    texts = {name: draws.integers(0, 11, 40, np.int32) for name in (1, 2, "three", 4, 5, 6, 7)}
    waiting = {name: list(cuts(draws, ids)) for name, ids in texts.items()}
    streams, begun = {name: model.stream(1) for name in texts}, set()
    while waiting:
        names = draws.permutation(np.array([*waiting], object))[: int(draws.integers(1, 4))].tolist()
        pieces = {name: waiting[name].pop(0) for name in names}
        waiting = {name: rest for name, rest in waiting.items() if rest}
        requests = [tokens(pieces[name], name=name, wanted=wanted, start=name not in begun) for name in names]
        begun |= set(names)
        for name, answer in zip(names, served.execute(requests), strict=True):
            rows = streams[name].feed(pieces[name][None])
            assert set(answer.arrays) == set(wanted)
            expected = rows if wanted[0] == "logits" else rows[:, -1]
            np.testing.assert_allclose(answer.arrays[wanted[0]], expected, atol=1e-4)
            (best,) = answer.arrays["next"][0]
            assert rows[0, -1, best] >= rows[0, -1].max() - 1e-4


def test_start_empties_the_memory_in_mid_sequence_and_end_frees_it(model):
    served = Stepping(model, 3, triton_server)
    fresh = model.stream(1).feed([[5, 6]], last=True)
    for flags in ({"start": True}, {"start": True}, {"start": True, "end": True}):
        (answer,) = served.execute([tokens([5, 6], name=1, wanted=("last",), **flags)])
        np.testing.assert_allclose(answer.arrays["last"], fresh, atol=1e-5)
    (answer,) = served.execute([tokens([7], name=1)])
    assert "sequence 1 is not known here, expected START" in answer.error.message


def test_a_start_beyond_the_slots_forgets_the_longest_idle_sequence(model):
    served = Stepping(model, 4, triton_server)
    served.execute([tokens([name], name=name, start=True) for name in (1, 2, 3, 4)])
    served.execute([tokens([1], name=1)])
    served.execute([tokens([9], name=5, start=True)])
    refused = {name: served.execute([tokens([1], name=name)])[0].error is not None for name in (1, 2, 3, 4, 5)}
    assert refused == {1: False, 2: True, 3: False, 4: False, 5: False}


def test_a_sequence_that_has_a_request_is_not_the_one_that_is_gone(model):
    """It was idle for longer than the others, and its request came behind the START in the same call."""
    served = Stepping(model, 4, triton_server)
    served.execute([tokens([name], name=name, start=True) for name in (1, 2, 3, 4)])
    began, goes_on = served.execute([tokens([9], name=5, start=True), tokens([1], name=1)])
    assert (began.error, goes_on.error) == (None, None)
    (gone,) = served.execute([tokens([1], name=2)])
    assert "is not known" in gone.error.message


def test_a_request_that_is_refused_changes_no_sequence(model):
    served, alone = Stepping(model, 3, triton_server), model.stream(1)
    served.execute([tokens([1, 2], name=1, start=True), tokens([3], name=2, start=True)])
    bad, good = served.execute([tokens([1, 11], name=1), tokens([4], name=2, wanted=("last",))])
    assert bad.error.message.startswith("tokens hold id 11")
    assert bad.error.code == triton_server.TritonError.INVALID_ARG
    alone.feed([[3]])
    np.testing.assert_allclose(good.arrays["last"], alone.feed([[4]], last=True), atol=1e-5)
    (answer,) = served.execute([tokens([5], name=1, wanted=("last",))])
    alone.reset()
    alone.feed([[1, 2]])
    np.testing.assert_allclose(answer.arrays["last"], alone.feed([[5]], last=True), atol=1e-5)


def test_a_request_that_would_give_back_too_much_is_refused(model, monkeypatch):
    monkeypatch.setattr(stepping, "MOST_BYTES", 3 * 11 * 4 * 5)
    monkeypatch.setattr(stepping, "MOST_POSITIONS", 8)
    served = Stepping(model, 3, triton_server)
    for count, wanted, said in (
        (6, "logits", "at most 5 with"),
        (5, "logits", ""),
        (9, "last", "at most 8 with"),
        (8, "last", ""),
    ):
        (answer,) = served.execute([tokens([1] * count, name=1, start=True, wanted=(wanted,))])
        assert (answer.error.message if answer.error else "").partition("expected ")[2].startswith(said)


def test_a_long_request_for_the_last_row_alone_makes_no_room_for_every_row(model, monkeypatch):
    served, fed = Stepping(model, 3, triton_server), []
    feed = served._stream.feed
    monkeypatch.setattr(
        served._stream, "feed", lambda *given, **more: fed.append((given[0].shape, more)) or feed(*given, **more)
    )
    answers = served.execute(
        [tokens([1] * 50, name=1, start=True, wanted=("last",)), tokens([1], name=2, start=True, wanted=("logits",))]
    )
    assert fed == [((3, 50), {"last": True}), ((3, 1), {"last": False})]
    assert [answer.error for answer in answers] == [None, None]


def test_an_engine_that_fails_ends_the_sequences_of_the_step_alone(model, monkeypatch):
    served = Stepping(model, 3, triton_server)
    served.execute([tokens([1], name=1, start=True), tokens([2], name=2, start=True)])
    with monkeypatch.context() as patch:
        patch.setattr(served._stream, "feed", lambda *_, **__: (_ for _ in ()).throw(txl_runtime.BackendError("no")))
        (failed,) = served.execute([tokens([1], name=1)])
    assert failed.error.message == "no The sequence's memory is gone: start it again."
    gone, there = served.execute([tokens([1], name=1), tokens([2], name=2)])
    assert "is not known" in gone.error.message
    assert there.error is None


@pytest.mark.parametrize("wanted", ["last", "logits"])
def test_no_request_overtakes_an_earlier_one_of_its_sequence(model, wanted):
    """One that asks for every position does not fit the step that the two others fit."""
    served, alone = Stepping(model, 3, triton_server), model.stream(1)
    _, first, second = served.execute(
        [
            tokens([1], name=1, start=True, wanted=("last",)),
            tokens([1, 2], name=2, start=True, wanted=(wanted,)),
            tokens([3], name=2, wanted=("last",)),
        ]
    )
    np.testing.assert_allclose(first.arrays[wanted], alone.feed([[1, 2]], last=wanted == "last"), atol=1e-5)
    np.testing.assert_allclose(second.arrays["last"], alone.feed([[3]], last=True), atol=1e-5)


@pytest.mark.parametrize(("call", "flags"), [("put", {}), ("reset", {"start": True})])
def test_a_sequence_whose_memory_cannot_be_changed_is_gone_and_its_row_serves_others(model, monkeypatch, call, flags):
    served = Stepping(model, 4, triton_server)
    for name in (1, 2, 3, 4):  # on three rows: the first one has none
        served.execute([tokens([name], name=name, start=True)])
    with monkeypatch.context() as patch:
        patch.setattr(served._stream, call, lambda *_: (_ for _ in ()).throw(txl_runtime.BackendError("no")))
        (failed,) = served.execute([tokens([1], name=1, **flags)])
    assert failed.error.message == "no The sequence's memory is gone: start it again."
    (gone,) = served.execute([tokens([1], name=1)])
    assert "is not known" in gone.error.message
    requests = [tokens([5], name=name, start=True, wanted=("last",)) for name in (5, 6, 7)]
    fresh = model.stream(1).feed([[5]], last=True)
    for answer in served.execute(requests):
        np.testing.assert_allclose(answer.arrays["last"], fresh, atol=1e-5)


def test_a_model_of_arrays_gives_what_it_gives_alone(tmp_path):
    """State of three types, the batch at two places, whole segments of 4 and 1 alone."""
    model = txl_runtime.load(recurrent().write(tmp_path / "a.txl"), backend="cpu")
    served, draws = Stepping(model, 6, triton_server), np.random.default_rng(0)
    alone = {name: model.stream(1) for name in range(1, 6)}
    for step in range(12):
        given = {}
        for name in draws.permutation([*alone])[:3].tolist():
            length = int(draws.choice([1, 4, 5, 9]))
            obs = draws.normal(size=(1, length, 5)).astype(np.float32)
            given[name] = {"obs": obs, "starts": np.array([draws.random() < 0.2])}
        everything = ("best", "which", "total", "known")
        fresh = {name: step == 0 or name not in served._rows._rows for name in given}
        answers = served.execute(
            [Request(name, inputs, everything, start=fresh[name]) for name, inputs in given.items()]
        )
        for (name, inputs), answer in zip(given.items(), answers, strict=True):
            expected = alone[name].feed(inputs)
            np.testing.assert_allclose(answer.arrays["best"], expected["best"], atol=1e-5)
            assert (answer.arrays["which"] == expected["which"]).all()
            np.testing.assert_allclose(answer.arrays["total"], expected["total"].T, atol=1e-5)
            assert (answer.arrays["known"] == expected["known"]).all()


def test_a_model_in_lockstep_serves_each_sequence_alone(tmp_path):
    """Rows that become more, a tensor that is absent at first, and a clock that all sequences of a stream share."""
    model = txl_runtime.load(growing().write(tmp_path / "a.txl"), backend="cpu")
    served, draws = Stepping(model, 4, triton_server), np.random.default_rng(0)
    alone, begun = {name: model.stream(1) for name in (1, 2, 3)}, set()
    for _ in range(10):
        pieces = {name: draws.integers(0, 11, 2, np.int32) for name in draws.permutation([1, 2, 3])[:2].tolist()}
        requests = [tokens(ids, name=name, wanted=("mean",), start=name not in begun) for name, ids in pieces.items()]
        begun |= set(pieces)
        for (name, ids), answer in zip(pieces.items(), served.execute(requests), strict=True):
            expected = alone[name].feed({"tokens": ids[None]})["mean"]
            np.testing.assert_allclose(answer.arrays["mean"], expected, atol=1e-5)
