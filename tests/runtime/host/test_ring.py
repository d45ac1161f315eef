"""The ring against rolled memory: the same function, whatever is done to a stream, and nothing of size M is moved."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from frozen import frozen
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from txl_runtime import Model, Stream, StreamState, UsageError, load
from txl_runtime.bundle.tables import ring_slots
from txl_runtime.host.placements import Ring

TOLERANCE = 2e-6  # relative, or absolute below 1
KINDS = ("ring", "zeros", "clusters")
kinds = pytest.mark.parametrize("kind", KINDS)
Pair = tuple[Model, Model]


@cache
def models(kind: str) -> Pair:
    """The bundle of a kind, loaded for the ring and rolled."""
    ring, rolled = (load(frozen(kind), threads=1, update=update) for update in ("ring", "rolled"))
    assert (ring.update, rolled.update) == ("ring", "rolled")
    return ring, rolled


def random_tokens(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 41, (rows, columns)).astype(np.int32)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * scale)


def assert_alike(ring: Stream, rolled: Stream) -> None:
    assert ring.batch_size == rolled.batch_size
    assert ring.fill.tolist() == rolled.fill.tolist()
    ours, theirs = ring.memory(), rolled.memory()
    assert list(ours) == list(theirs)
    for name, rows in theirs.items():
        assert_close(ours[name], rows)


def same_bits(found: np.ndarray, expected: np.ndarray) -> bool:
    return found.shape == expected.shape and found.tobytes() == expected.tobytes()


def heads(stream: Stream) -> list[int]:
    return stream.snapshot().head.tolist()


# --- the same function --------------------------------------------------------------------------------------------


def through_a_file(state: StreamState, path: Path) -> StreamState:
    state.save(path)
    return StreamState.load(path)


def do(kind: str, streams: tuple[Stream, Stream], kept: list[list[StreamState]], draws: Any, path: Path) -> None:
    """One thing that can be done to a stream, done to both; results are compared."""
    ring, _ = streams
    b, longest, most = ring.batch_size, ring._manifest.segment_lengths[0], ring._manifest.batch_size
    if kind in ("step", "feed"):
        columns = int(draws.integers(1, longest + 1 if kind == "step" else 3 * longest))
        lengths = draws.integers(0, columns + 1, b) if draws.random() < 0.7 else None
        tokens = draws.integers(0, 41, (b, columns))
        ours, theirs = (getattr(stream, kind)(tokens, lengths) for stream in streams)
        assert_close(ours, theirs)
    elif kind == "score":
        tokens = draws.integers(0, 41, (b, int(draws.integers(2, 10))))
        ours, theirs = (stream.score(tokens) for stream in streams)
        assert_close(ours, theirs)
    elif kind == "reset":
        rows = draws.random(b) < 0.4
        for stream in streams:
            stream.reset(rows)
    elif kind == "select":
        rows = draws.integers(0, b, int(draws.integers(1, most + 1)))
        for stream in streams:
            stream.select(rows)
    elif kind == "snapshot":
        kept.append([stream.snapshot() for stream in streams])
    else:
        fitting = [states for states in kept if states[0].batch_size == b]
        if fitting:
            states = fitting[int(draws.integers(len(fitting)))]
            if kind == "reload":
                states = [through_a_file(state, path / str(index)) for index, state in enumerate(states)]
            if kind == "swap":  # what one form of memory was is restored into the other
                states = states[::-1]
            for stream, state in zip(streams, states, strict=True):
                stream.restore(state)


KINDS_OF_CALL = ("step", "step", "step", "feed", "score", "reset", "select", "snapshot", "restore", "reload", "swap")


@pytest.mark.parametrize(
    "kind", [kind if kind == "ring" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
@settings(
    max_examples=8,
    phases=[Phase.generate],  # making a long run shorter takes minutes and tells little
    report_multiple_bugs=False,
)
@given(calls=st.lists(st.sampled_from(KINDS_OF_CALL), min_size=25, max_size=60), seed=st.integers(0, 2**32 - 1))
def test_whatever_is_done_to_a_stream_ring_and_rolled_stay_alike(tmp_path_factory, kind, calls, seed):
    ring, rolled = (model.stream() for model in models(kind))
    draws, path, kept = np.random.default_rng(seed), tmp_path_factory.mktemp("states"), []
    for call in calls:
        do(call, (ring, rolled), kept, draws, path)
        assert_alike(ring, rolled)


@kinds
def test_a_long_run_stays_alike_many_times_around_the_ring(kind):
    ring, rolled = (model.stream() for model in models(kind))
    draws, b = np.random.default_rng(0), ring.batch_size
    laps, before = np.zeros(b, int), np.zeros(b, int)
    for _ in range(100):
        columns = int(draws.integers(1, 5))
        tokens, lengths = draws.integers(0, 41, (b, columns)), draws.integers(0, columns + 1, b)
        assert_close(ring.step(tokens, lengths), rolled.step(tokens, lengths))
        laps += np.array(heads(ring)) < before
        before = np.array(heads(ring))
    assert_alike(ring, rolled)
    assert laps.min() >= 8
    prompt = random_tokens(b, 6)
    drawn = [list(s.generate(prompt, 30, temperature=0, lengths=[6, 1, 4][:b])) for s in (ring, rolled)]
    assert np.array_equal(*drawn)


# --- states -------------------------------------------------------------------------------------------------------


def test_restore_is_bit_for_bit_wherever_the_head_stands(tmp_path):
    model, _ = models("ring")
    stream, seen = model.stream(), set()
    for seed in range(13):
        stream.step(random_tokens(3, 1, seed), [1, seed % 2, 1])
        state = stream.snapshot()
        seen.add(int(state.head[0]))
        other = model.stream()
        other.feed(random_tokens(3, 3 + seed, 100))
        other.restore(through_a_file(state, tmp_path / "a.state"))
        assert heads(other) == heads(stream)
        tokens = random_tokens(3, 9, 200 + seed)
        expected = stream.feed(tokens)
        assert same_bits(other.feed(tokens), expected)
        for name, rows in stream.memory().items():
            assert same_bits(other.memory()[name], rows)
        stream.restore(state)
    assert seen == set(range(10))


def test_a_state_knows_its_heads():
    ring, rolled = (model.stream() for model in models("ring"))
    for stream in (ring, rolled):
        stream.feed(random_tokens(3, 9), [9, 4, 0])
    assert heads(ring) == [9, 4, 0]
    ring.step(random_tokens(3, 4), [3, 0, 1])
    assert heads(ring) == [12 - 10, 4, 1]
    assert ring.snapshot().head.dtype == np.int32
    assert heads(rolled) == [0, 0, 0]
    ring.select([1, 0])
    assert heads(ring) == [4, 2]
    ring.reset([0])
    assert heads(ring) == [0, 2]


@pytest.mark.parametrize("change", [None, 1_000_003, -4], ids=["no head", "beyond the ring", "negative"])
def test_the_head_of_a_state_is_no_part_of_the_function(tmp_path, change):
    ring, rolled = (model.stream() for model in models("ring"))
    for stream in (ring, rolled):
        stream.feed(random_tokens(3, 9), [9, 4, 0])
    head = None if change is None else np.array([change, change, change + 1], np.int32)
    state = replace(ring.snapshot(), head=head)
    for given_state in (state, through_a_file(state, tmp_path / "a.state")):
        other = models("ring")[0].stream()
        other.feed(random_tokens(3, 5, 3))
        other.restore(given_state)
        twin = models("ring")[1].stream()
        twin.restore(rolled.snapshot())
        for seed in range(8):
            tokens, lengths = random_tokens(3, 4, seed), [4, seed % 5, 2]
            assert_close(other.step(tokens, lengths), twin.step(tokens, lengths))
            assert_alike(other, twin)


def test_a_file_without_heads_is_a_state_without_them_and_heads_that_do_not_fit_are_refused(tmp_path):
    stream, path = models("ring")[0].stream(), tmp_path / "a.state"
    stream.feed(random_tokens(3, 5))
    assert through_a_file(stream.snapshot(), path).head.tolist() == [5] * 3
    assert through_a_file(replace(stream.snapshot(), head=None), path).head is None
    with safe_open(path, "numpy") as file:
        assert "head" not in file.keys()  # noqa: SIM118 - no mapping
    for head in (np.zeros(2, np.int32), np.zeros(3, np.int64), np.zeros((3, 1), np.int32)):
        with pytest.raises(UsageError, match=r"its head is int(32|64) \[.*\], expected int32 \[3\]"):
            through_a_file(replace(stream.snapshot(), head=head), path)


# --- nothing of size M is moved -----------------------------------------------------------------------------------


def test_each_state_is_one_buffer_bound_as_input_and_output_once_per_program_and_number_of_sequences(monkeypatch):
    model, _ = models("ring")
    noted: list[tuple[str, dict[str, np.ndarray], dict[str, np.ndarray]]] = []
    bind = model.backend.engine.bind

    def noting(program: Any, inputs: Any, outputs: Any) -> Any:
        noted.append((program.name, dict(inputs), dict(outputs)))
        return bind(program, inputs, outputs)

    monkeypatch.setattr(model.backend.engine, "bind", noting)
    stream = model.stream()
    (memory,) = stream.loop.placements
    assert isinstance(memory, Ring)
    addresses = {name: array.ctypes.data for name, array in memory.tensors.items()}
    for seed in range(60):
        stream.feed(random_tokens(3, 1 + seed % 7, seed))
    stream.restore(stream.snapshot())
    stream.reset([1])
    stream.select([2, 0])
    stream.feed(random_tokens(2, 9))
    segments = [bound for bound in noted if bound[0].startswith("hidden-ring")]
    names = [f"hidden-ring-{length}" for length in model.segment_lengths]
    bound = [(name, len(inputs["tokens"])) for name, inputs, _ in segments]
    assert sorted(bound) == sorted({*((name, 3) for name in names), *bound}), "each once"
    assert {rows for _, rows in bound} == {2, 3}
    for _, inputs, outputs in segments:
        for state in model.manifest.states_of("ring"):
            assert inputs[state.input].shape == outputs[state.output].shape
            for bound in (inputs[state.input], outputs[state.output]):
                assert bound.ctypes.data == addresses[state.name]
            assert np.shares_memory(inputs[state.input], memory.all), "all states are views of one array"
    assert {name: array.ctypes.data for name, array in memory.tensors.items()} == addresses


def test_the_engine_works_on_the_bound_arrays_themselves():
    model, _ = models("ring")
    array = np.zeros((3, 4), np.float32)
    assert model.backend.engine._value(array).data_ptr() == array.ctypes.data


@kinds
def test_a_step_writes_the_segments_slots_and_no_others(kind):
    model, _ = models(kind)
    ring, columns = ring_slots(model.memory_length, model.segment_lengths[0])
    stream, draws, spilled, changed = model.stream(), np.random.default_rng(0), set(), 0
    b = stream.batch_size
    for _ in range(120):
        length = int(draws.choice(model.segment_lengths))
        lengths = draws.integers(0, length + 1, b)
        before, stood = stream.loop.placements[0].all.copy(), np.array(heads(stream))
        stream.step(draws.integers(0, 41, (b, length)), lengths)
        after = stream.loop.placements[0].all
        for row in range(b):
            written = np.zeros(columns, bool)
            written[stood[row] : stood[row] + length] = True
            over = stood[row] + lengths[row] - ring
            if over >= 0:
                written[:over] = True
                spilled.add(int(over))
            assert same_bits(after[:, row][:, :, ~written], before[:, row][:, :, ~written])
            changed += not same_bits(after[:, row], before[:, row])
    assert spilled == set(range(model.segment_lengths[0])), "spilled every number of rows"
    assert changed > 60


def test_streams_have_memories_of_their_own():
    model, _ = models("ring")
    one, other = model.stream(), model.stream()
    assert not np.shares_memory(one.loop.placements[0].all, other.loop.placements[0].all)
    taken = one.memory()
    assert not any(np.shares_memory(rows, one.loop.placements[0].all) for rows in taken.values())


# --- lean loading -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "update"), [("ring", "ring"), ("ring", "rolled"), ("clusters", "ring"), ("zeros", "rolled")]
)
def test_a_lean_model_computes_the_same(kind, update):
    plain = models(kind)[update == "rolled"]
    lean = load(plain.bundle.path, threads=1, update=update, lean=True)
    ours, theirs = lean.stream(), plain.stream()
    draws, b = np.random.default_rng(0), ours.batch_size
    for _ in range(25):
        columns = int(draws.integers(1, 9))
        tokens, lengths = draws.integers(0, 41, (b, columns)), draws.integers(0, columns + 1, b)
        lean.backend.release_pages()  # what comes back is the same
        assert_close(ours.feed(tokens, lengths), theirs.feed(tokens, lengths))
        assert_alike(ours, theirs)
    tokens = random_tokens(b, 12)
    assert_close(ours.score(tokens), theirs.score(tokens))


@pytest.mark.parametrize("update", ["ring", "rolled"])
def test_the_sessions_of_a_lean_model_share_one_mapping_of_the_weights(update, monkeypatch):
    given: dict[str, set[int]] = {}
    options = onnxruntime.SessionOptions

    class Options(options):
        def add_initializer(self, name, value):
            given.setdefault(name, set()).add(value.data_ptr())
            super().add_initializer(name, value)

    monkeypatch.setattr(onnxruntime, "SessionOptions", Options)
    bundle = models("ring")[0].bundle
    load(bundle.path, update=update, lean=True)
    assert all(len(places) == 1 for places in given.values()), "the same place in every session"
    with safe_open(bundle.path / "weights.safetensors", framework="numpy") as stored:
        names = set(stored.keys())
    assert {name for name in names if "query_key_value" in name or "feed_forward.inner.weight" in name} <= set(given)
    assert set(given) <= names


def test_in_a_lean_model_sequences_are_independent_too():
    lean = load(models("clusters")[0].bundle.path, lean=True)
    for seed in range(10):
        tokens = random_tokens(lean.batch_size, 9, seed)
        others = tokens.copy()
        others[1:] = random_tokens(len(others) - 1, 9, 100 + seed)
        first, second = (lean.stream().score(ids)[0] for ids in (tokens, others))
        assert same_bits(first, second)
