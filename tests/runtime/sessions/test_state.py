"""One session's state as an object, as bytes and as a file: the same bits, and what does not fit is refused by name."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from frozen import frozen
from mutated_states import joined, mutated, split
from step_models import FEATURES, counting, growing, recurrent
from txl_runtime import Stream, StreamState, UsageError, load
from txl_runtime.sessions import Request, Sessions
from txl_runtime.sessions.state import SessionState, check_name, largest_state
from txl_runtime.streaming.state import RowState

B, V = 3, 41


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    found = {update: load(frozen("ring"), "cpu", 1, update=update) for update in ("ring", "rolled")}
    for make in (recurrent, counting):
        found[make.__name__] = load(make().write(folder / make.__name__), "cpu", 1)
    return found


def fed(model) -> Stream:
    """A stream whose sequences have come to different places."""
    stream = model.stream()
    draws = np.random.default_rng(0)
    if model.vocab_size:
        stream.feed(draws.integers(0, model.vocab_size, (B, 9)), [9, 3, 6])
    else:
        for _ in range(3):
            stream.run({"obs": draws.normal(size=(B, 4, FEATURES)).astype(np.float32), "starts": [True, False, False]})
    return stream


def taken(model, stream, row, pending=None, seen=6) -> SessionState:
    table = model.manifest.states_of(model.update)
    return SessionState.of(stream.take(row), model.manifest, table, pending, seen)


def bits(row: RowState):
    """All of one sequence's state."""
    tensors = {name: (str(rows.dtype), rows.shape, rows.tobytes()) for name, rows in row.tensors.items()}
    return row.fill, row.head, tensors


KINDS = ["ring", "rolled", "recurrent", "counting"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_comes_back_from_bytes_bit_for_bit(models, kind):
    model = models[kind]
    stream, table = fed(model), model.manifest.states_of(model.update)
    pending = 5 if model.vocab_size else None
    state = taken(model, stream, 2, pending, 123)
    again = SessionState.from_bytes(state.to_bytes())
    assert (again.pending, again.seen, again.model_id) == (pending, 123, model.manifest.model_id)
    held = (*again.state.memory.values(), *(again.state.states or {}).values())
    assert sum(array.nbytes for array in held) <= largest_state(model.manifest, table)
    stream.put(0, again.row(model.manifest, table))
    assert bits(stream.take(0)) == bits(stream.take(2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_of_one_reads_it_and_gives_one(models, kind, tmp_path):
    model = models[kind]
    stream, table = fed(model), model.manifest.states_of(model.update)
    path = tmp_path / "one.state"
    taken(model, stream, 1).save(path)
    alone = model.stream(1)
    alone.restore(StreamState.load(path))
    assert bits(alone.take(0)) == bits(stream.take(1))
    alone.snapshot().save(path)
    state = SessionState.load(path)
    assert (state.pending, state.seen) == (None, int(stream.fill[1]))
    stream.put(0, state.row(model.manifest, table))
    assert bits(stream.take(0)) == bits(stream.take(1))


def test_states_that_all_sequences_share_are_stored_too(tmp_path):
    model = load(growing().write(tmp_path / "growing"), "cpu", 1)
    table, stream = model.manifest.states_of(model.update), model.stream(1)
    fresh = SessionState.from_bytes(taken(model, stream, 0).to_bytes())
    assert sorted(fresh.state.states) == ["clock", "rows"]  # the summary is absent
    stream.feed({"tokens": np.array([[1, 2, 3, 4]])})
    state = SessionState.from_bytes(taken(model, stream, 0).to_bytes())
    before = bits(stream.take(0))
    stream.feed({"tokens": np.array([[5, 6]])})
    stream.put(0, state.row(model.manifest, table))
    assert bits(stream.take(0)) == before
    stream.put(0, fresh.row(model.manifest, table))
    assert bits(stream.take(0)) == bits(model.stream(1).take(0))


def test_a_file_of_several_sequences_is_refused(models, tmp_path):
    path = tmp_path / "three.state"
    fed(models["ring"]).snapshot().save(path)
    with pytest.raises(UsageError, match=r"the state of 3 sequences, expected one"):
        SessionState.load(path)


MISFITS = {
    "another model": (lambda s: replace(s, state=replace(s.state, model_id="0" * 64)), "belongs to model 000000000000"),
    "a token beyond the vocabulary": (lambda s: replace(s, pending=V), r"pending token is 41, expected none or an id"),
    "a token below it": (lambda s: replace(s, pending=-1), "pending token is -1"),
    "a token that is no number": (lambda s: replace(s, pending="5"), "pending token is '5'"),
    "a negative number of positions": (lambda s: replace(s, seen=-1), "has seen -1"),
    "more positions than there are": (lambda s: replace(s, seen=10**15), "has seen 1000000000000000"),
    "no state": (lambda s: replace(s, state=None), "the state is a NoneType"),
    "another form of memory": (
        lambda s: replace(s, state=replace(s.state, states={}, memory={})),
        "holds whole tensors, this model carries memory rows",
    ),
    "another number of rows": (
        lambda s: replace(s, state=replace(s.state, fill=s.state.fill - 1)),
        r"expected float32 \[1, 5, 2, 4\]",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_refused(models, misfit):
    model = models["ring"]
    change, said = MISFITS[misfit]
    state = change(taken(model, fed(model), 2))
    with pytest.raises(UsageError, match=said):
        state.row(model.manifest, model.manifest.states_of(model.update))


@pytest.mark.parametrize("update", ["ring", "rolled"])
@pytest.mark.parametrize("head", [-1, 2**31 - 1, 2**40, -(2**62)])
def test_a_head_that_fits_is_served(models, update, head):
    """A state that is put is kept, parked and put on a row: none of these refuses what a different one takes."""
    model = models[update]
    state = taken(model, fed(model), 2)
    kind = np.int32 if abs(head + 0.5) < 2**31 else np.int64
    odd = replace(state, state=replace(state.state, head=np.array([head], kind)))
    with Sessions(model, rows=1) as sessions:
        for name, given in (("odd", odd), ("plain", state)):
            sessions.put(name, given)
            ticket = sessions.submit(Request([1, 2, 3]), name)
            while sessions.round():
                pass
            assert ticket.error is None
        found, expected = (sessions.take(name).state.memory for name in ("odd", "plain"))
    for name, rows in expected.items():
        np.testing.assert_allclose(found[name], rows, rtol=0, atol=1e-5)


def test_a_model_without_tokens_has_none_to_feed(models):
    model = models["recurrent"]
    with pytest.raises(UsageError, match=r"pending token is 0, expected none, since the model reads no tokens"):
        taken(model, fed(model), 0, pending=0).row(model.manifest, model.manifest.states_of(model.update))


@pytest.mark.parametrize(
    ("name", "said"), [("session.pending", "-1"), ("session.pending", "1e3"), ("session.seen", "9" * 19)]
)
def test_numbers_in_the_metadata_are_numbers(models, name, said):
    model = models["ring"]
    header, body = split(taken(model, fed(model), 0, 3).to_bytes())
    header["__metadata__"][name] = said
    with pytest.raises(UsageError, match=rf"the body: its {name} is '{said}', expected a whole number"):
        SessionState.from_bytes(joined(header, body), "the body")


def test_bytes_that_are_no_state_are_refused_whatever_they_are(models):
    model, draws = models["ring"], np.random.default_rng(0)
    table = model.manifest.states_of(model.update)
    good = [taken(models[kind], fed(models[kind]), 2, None, 7).to_bytes() for kind in KINDS]
    said = []
    tracemalloc.start()
    try:
        for number in range(400):
            data = mutated(good[number % len(good)], draws)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                SessionState.from_bytes(data).row(model.manifest, table)
            except UsageError as error:
                said.append(str(error))
            assert tracemalloc.get_traced_memory()[1] - before < 20 * len(data) + 2**18
    finally:
        tracemalloc.stop()
    assert len(said) > 300
    assert max(map(len, said)) < 600


def test_any_text_is_a_name_and_nothing_else():
    for name in ("a", "x" * 256, "../../etc/passwd", "a\0b", "день 🌊", " ", "\n", "NUL", "-"):
        assert check_name(name) == name
    for wrong in ("", "x" * 257, "\ud800", "a\udfff", b"a", None, 3, ["a"]):
        with pytest.raises(UsageError, match=r"the session's name is .*, expected text of 1 … 256 chara") as caught:
            check_name(wrong)
        assert len(str(caught.value)) < 250
