"""State by the table's names and shapes: shown, moved, stored and taken up by another process; lockstep."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from frozen import frozen
from safetensors.numpy import save_file
from stand_ins.steps import FRAME, open_rows, write
from step_models import FEATURES, VOCABULARY, B, growing, recurrent
from txl_runtime import Model, Stream, StreamState, UsageError, load
from txl_runtime.sessions import SessionState
from txl_runtime.streaming.state import RowState

KINDS = {"recurrent": recurrent, "growing": growing, "open": open_rows}
every = pytest.mark.parametrize("kind", KINDS)
lockstep = pytest.mark.parametrize("kind", ["growing", "open"])


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    models: dict[str, Model] = {}

    def open_one(kind: str) -> Model:
        if kind not in models:
            path = KINDS[kind]().write(tmp_path_factory.mktemp("own") / "own.txl")
            models[kind] = load(path, backend="cpu", threads=1)
        return models[kind]

    return open_one


def segment(kind: str, seed: int, b: int = B) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(seed)
    if kind == "recurrent":
        return {"obs": draws.normal(size=(b, 4, FEATURES)), "starts": draws.random(b) < 0.3}
    if kind == "open":
        return {"frames": draws.normal(size=(b, 2, FRAME))}
    return {"tokens": draws.integers(0, VOCABULARY, (b, 2))}


def ran(stream: Stream, kind: str, *seeds: int) -> Stream:
    for seed in seeds:
        stream.run(segment(kind, seed, stream.batch_size))
    return stream


def bits(arrays: Any) -> dict[str, tuple[Any, ...]]:
    return {name: (str(array.dtype), array.shape, array.tobytes()) for name, array in arrays.items()}


CONTINUE = """
import sys
import numpy as np
import txl_runtime
stream = txl_runtime.load(sys.argv[1], backend="cpu", threads=1).stream(int(sys.argv[4]))
stream.restore(txl_runtime.StreamState.load(sys.argv[2]))
given = dict(np.load(sys.argv[2] + ".npz"))
np.savez(sys.argv[3], **stream.run(given), **{"state." + name: array for name, array in stream.state().items()})
"""


@pytest.mark.parametrize(("kind", "runs", "b"), [("recurrent", 1, B), ("growing", 1, B), ("open", 4, 1)])
def test_another_process_goes_on_bit_for_bit(model_of, tmp_path, kind, runs, b):
    model, saved, out = model_of(kind), str(tmp_path / "a.state"), str(tmp_path / "out.npz")
    stream = ran(model.stream(b), kind, *range(runs))
    stream.snapshot().save(saved)
    assert StreamState.load(saved).batch_size == b
    given = segment(kind, 99, b)
    np.savez(saved + ".npz", **given)
    command = [sys.executable, "-W", "error", "-c", CONTINUE, str(model.bundle.path), saved, out, str(b)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    expected = stream.run(given) | {f"state.{name}": array for name, array in stream.state().items()}
    assert bits(np.load(out)) == bits(expected)


def test_a_file_says_which_form_it_has(model_of, tmp_path):
    from safetensors import safe_open

    own = ran(model_of("recurrent").stream(), "recurrent", 0)
    xl = load(frozen("ring"), "cpu", 1).stream()
    for stream, version, names in ((own, 2, ["c", "count", "h", "seen"]), (xl, 1, None)):
        stream.snapshot().save(tmp_path / "a.state")
        with safe_open(tmp_path / "a.state", framework="numpy") as stored:
            assert stored.metadata()["format"] == f"txl-deploy.state/{version}"
            if names:
                assert sorted(stored.keys()) == names
                assert bits({name: stored.get_tensor(name) for name in names}) == bits(own.state())
            else:
                assert {"fill", "head", "layers.00.key"} <= set(stored.keys())


MISFITS: dict[str, tuple[Any, str]] = {
    "a missing tensor": (
        lambda t: {k: v for k, v in t.items() if k != "h"},
        r"the state's h is absent, expected float32",
    ),
    "a surplus tensor": (lambda t: {**t, "x": t["h"]}, "the state has x, expected c, count, h, seen"),
    "another type": (
        lambda t: {**t, "count": t["count"].astype(np.int64)},
        r"count is int64 \[3\], expected int32 \[3\]",
    ),
    "another shape": (lambda t: {**t, "h": t["h"][:, :2]}, r"h is float32 \[1, 2, 6\], expected float32 \[1, 3, 6\]"),
    "another rank": (lambda t: {**t, "h": t["h"][0]}, r"h is float32 \[3, 6\], expected"),
    "no array": (lambda t: {**t, "h": [1]}, r"h is list, expected"),
    "memory rows": (lambda t: None, "the state holds memory rows, this model carries whole tensors"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_refused_and_the_state_is_what_it_was(model_of, misfit):
    change, said = MISFITS[misfit]
    stream = ran(model_of("recurrent").stream(), "recurrent", 0)
    snapshot = stream.snapshot()
    before = bits(ran(stream, "recurrent", 1).state())
    with pytest.raises(UsageError, match=said):
        stream.restore(replace(snapshot, states=change(snapshot.states)))
    assert bits(stream.state()) == before


def test_rows_beyond_the_table_and_other_models_are_refused(model_of):
    stream = ran(model_of("growing").stream(), "growing", *range(5))
    snapshot, before = stream.snapshot(), bits(stream.state())
    tall = np.zeros((B, 6, 4), np.float32)
    with pytest.raises(UsageError, match=r"rows is float32 \[3, 6, 4\], expected float32 \[3, 0 … 5, 4\]"):
        stream.restore(replace(snapshot, states={**snapshot.states, "rows": tall}))
    odd = {**snapshot.states, "rows": snapshot.states["rows"][:, :3]}
    with pytest.raises(UsageError, match=r"the state's rows has 3 rows, expected one of \[0, 2, 4, 5\]"):
        stream.restore(replace(snapshot, states=odd))
    assert bits(stream.state()) == before
    with pytest.raises(UsageError, match="belongs to model"):
        model_of("open").stream().restore(snapshot)
    with pytest.raises(UsageError, match="holds 3 sequences, expected 2; open a stream of as many"):
        model_of("growing").stream(2).restore(snapshot)
    stream.restore(replace(snapshot, states={k: v for k, v in snapshot.states.items() if k != "summary"}))
    assert "summary" not in stream.state(), "it may be absent"


def test_a_file_that_does_not_say_how_many_sequences_it_has_is_refused(tmp_path):
    for size in ("", "0", "-1", "many", "9" * 12):
        facts = {"format": "txl-deploy.state/2", "model_id": "0" * 64, "batch_size": size}
        save_file({"h": np.zeros(2, np.float32)}, tmp_path / "a.state", metadata=facts)
        with pytest.raises(UsageError, match="another kind of file, expected a saved state"):
            StreamState.load(tmp_path / "a.state")


@lockstep
def test_lockstep_resets_all_or_none(model_of, kind):
    stream = ran(model_of(kind).stream(), kind, 0)
    before = bits(stream.state())
    for rows in ([0], [True, False, False], [1, 2]):
        with pytest.raises(UsageError, match="expected all 3 or none, because this model's sequences run in lockstep"):
            stream.reset(rows)
    stream.reset([])
    stream.reset([False] * B)
    assert bits(stream.state()) == before
    stream.reset([2, 0, 1])
    assert bits(stream.state()) == bits(model_of(kind).stream().state())


@lockstep
def test_lockstep_has_no_state_of_one_sequence(model_of, kind):
    stream, single = ran(model_of(kind).stream(), kind, 0), ran(model_of(kind).stream(1), kind, 0)
    taken = single.take(0)
    for call in (lambda: stream.take(0), lambda: stream.put(0, taken)):
        with pytest.raises(UsageError, match=r"names one of 3 sequences, expected a stream of one, .* lockstep"):
            call()
    other = ran(model_of(kind).stream(1), kind, 5, 6)
    other.put(0, taken)
    assert bits(other.state()) == bits(single.state())
    assert bits(other.run(segment(kind, 3, 1))) == bits(single.run(segment(kind, 3, 1)))


ROWS: dict[str, tuple[Any, str]] = {
    "no state": (lambda s: s.tensors, "the state is a dict, expected what Stream.take returned"),
    "a missing tensor": (lambda s: RowState(0, 0, {}), "the sequence's c is absent, expected float32 .1, 6."),
    "a whole tensor": (
        lambda s: RowState(0, 0, {**s.tensors, "h": np.zeros((1, B, 6), np.float32)}),
        r"h is float32 \[1, 3, 6\], expected float32 \[1, 6\]",
    ),
}


@pytest.mark.parametrize("misfit", ROWS)
def test_a_sequence_that_does_not_fit_is_not_put(model_of, misfit):
    change, said = ROWS[misfit]
    stream = ran(model_of("recurrent").stream(), "recurrent", 0)
    before = bits(stream.state())
    with pytest.raises(UsageError, match=said):
        stream.put(1, change(stream.take(0)))
    for row in (3, -1, True, 0.5, "0"):
        with pytest.raises(
            UsageError, match="names sequence" if row in (True, 0.5, "0") else "rows are|names sequence"
        ):
            stream.take(row)
    with pytest.raises(UsageError, match=r"a TakenState, expected a StreamState; .* what take returned is for put"):
        stream.restore(stream.take(0))
    assert bits(stream.state()) == before


@pytest.mark.parametrize("update", ["ring", "rolled"])
def test_a_transformer_xls_state_is_its_rolled_table_whatever_moves(update):
    model = load(frozen("ring"), "cpu", 1, update=update)
    stream = model.stream()
    tokens = np.random.default_rng(0).integers(0, 41, (B, 9))
    assert not any(array.any() for array in stream.state().values())
    stream.feed(tokens, [9, 3, 0])
    state, memory, table = stream.state(), stream.memory(), model.manifest.states_of("rolled")
    assert {name: (str(array.dtype), array.shape) for name, array in state.items()} == {
        entry.name: ("float32", entry.shape) for entry in table
    }
    for entry in table:
        rows = np.moveaxis(state[entry.name], entry.row_axis, 1)
        assert rows[:, -6:].tobytes() == memory[entry.name][:, -6:].tobytes()
        assert not rows[1, :3].any()
        assert rows[1, 3:].all()
    one = model.stream(1)
    assert one.state()["layers.00.key"].shape[0] == 1
    one.put(0, stream.take(1))
    assert one.fill.tolist() == [3]
    assert one.step(tokens[:1, :2]).tobytes() == (stream.select([1]), stream.step(tokens[:1, :2]))[1].tobytes()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: replace(s, fill=7), "the sequence's fill is 7 and its head 3, expected 0 … 6 and a whole number"),
        (lambda s: replace(s, head=0.5), "its head 0.5, expected"),
        (lambda s: replace(s, fill=2), r"layers\.00\.key is float32 \[3, 2, 4\], expected float32 \[2, 2, 4\]"),
        (lambda s: replace(s, tensors={}), r"layers\.00\.key is absent, expected float32 \[3, 2, 4\]"),
        (lambda s: replace(s, tensors={**s.tensors, "x": np.zeros(3)}), r"x is float64 \[3\], expected absent"),
    ],
)
def test_memory_rows_that_do_not_fit_are_not_put(change, said):
    stream = load(frozen("ring"), "cpu", 1).stream()
    stream.feed(np.ones((B, 3), int))
    before = bits(stream.state())
    with pytest.raises(UsageError, match=said):
        stream.put(1, change(stream.take(0)))
    assert bits(stream.state()) == before


@pytest.mark.parametrize("kind", ["ring", "rolled", "recurrent", "open"])
def test_one_sequence_goes_to_bytes_or_a_file_and_on_in_another_row(model_of, tmp_path, kind):
    if kind in KINDS:
        model = model_of(kind)
        b = B if model.manifest.can.run_apart else 1
        stream, other = (ran(model.stream(b), kind, *seeds) for seeds in ((0, 1), (2,)))
    else:
        model, b = load(frozen("ring"), "cpu", 1, update=kind), B
        stream, other = model.stream(), model.stream()
        stream.feed(np.arange(3 * 18).reshape(B, 18) % 41, [18, 3, 0])
        other.feed(np.ones((B, 2), int))
    for row in range(b):
        taken = stream.take(row)
        taken.save(path := tmp_path / "one.safetensors")
        read = [StreamState.from_bytes(taken.to_bytes()), StreamState.load(path), SessionState.load(path).state]
        for state in (*read, taken.snapshot(), taken):
            other.put(b - 1, state)
            again = other.take(b - 1)
            assert (again.fill, again.head) == (taken.fill, taken.head)
            assert bits(again.tensors) == bits(taken.tensors)
            other.reset()


def test_a_state_of_another_model_or_of_several_sequences_is_not_put():
    model, stranger, other = (load(frozen(name), "cpu", 1) for name in ("ring", "ring", "zeros"))
    stream = model.stream()
    stream.feed(np.ones((B, 3), int))
    before = bits(stream.state())
    stream.put(0, stranger.stream().take(0))  # the same model, opened once more
    stream.put(0, model.stream().take(0))
    stream.put(0, stream.take(1))
    for state in (other.stream().take(0), StreamState.from_bytes(other.stream().take(0).to_bytes())):
        with pytest.raises(UsageError, match=r"belongs to model .*; restore it in the model it was taken from"):
            stream.put(0, state)
    with pytest.raises(UsageError, match=r"the state holds 3 sequences, expected 1; open .* or take and put"):
        stream.put(0, stream.snapshot())
    with pytest.raises(UsageError, match=r"^the state: .*expected a saved state"):
        StreamState.from_bytes(stream.take(0).to_bytes()[:-5])
    assert bits(stream.state()) == before


@pytest.mark.parametrize("update", ["ring", "rolled"])
def test_a_head_is_any_whole_number_and_counts_round_the_ring(update):
    model = load(frozen("ring"), "cpu", 1, update=update)
    stream = model.stream()
    stream.feed(np.ones((B, 3), int))
    taken, slots = stream.take(0), model.manifest.states_of("ring")[0].slots
    for turns in (-1, 1, 2**40):
        stream.put(1, replace(taken, head=taken.head + turns * slots))
        again = stream.take(1)
        assert (again.fill, again.head) == (taken.fill, taken.head)
        assert bits(again.tensors) == bits(taken.tensors)


def test_a_model_whose_sequences_influence_one_another_has_all_of_them(tmp_path):
    path = write(recurrent(), tmp_path / "joint.txl", streams="lockstep", joint=True)
    model = load(path, "cpu")
    with pytest.raises(UsageError, match=f"batch_size is 1, expected {B}, because this model's sequences influence"):
        model.stream(1)
    stream = model.stream()
    with pytest.raises(UsageError, match=f"rows name 1 sequences, expected {B}"):
        stream.select([0])
    stream.select(list(range(B))[::-1])
