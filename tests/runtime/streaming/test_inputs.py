"""Inputs by name are held against the tables; what a model lacks for tokens is said by name."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stand_ins.steps import AHEAD, FRAME, looking, speaking, spoken, write
from step_models import FEATURES, VOCABULARY, B, counting, growing, recurrent
from txl_runtime import Model, Stream, UsageError, load

MODELS = {
    "looking": looking,
    "recurrent": recurrent,
    "growing": growing,
    "counting": counting,
    "words first": lambda: speaking(("B", "L")),
    "time first": lambda: speaking(("L", "B")),
    "one by one": lambda: speaking(("B",), (1,)),
    "lockstep": lambda: speaking(("B", "L"), streams="lockstep"),
    "whole segments": lambda: speaking(("B", "L"), (4,)),
}
FIELDS = {"whole segments": {"commits": "segment"}}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    made: dict[str, Model] = {}

    def make(kind: str) -> Model:
        if kind not in made:
            path: Path = tmp_path_factory.mktemp("own") / "own.txl"
            made[kind] = load(write(MODELS[kind](), path, **FIELDS.get(kind, {})), backend="cpu", threads=1)
        return made[kind]

    return make


FRAMES = {
    "frames": np.zeros((4 + AHEAD, B, FRAME)),
    "marks": np.zeros((B, 4), np.int64),
    "gain": np.ones(FRAME),
}


def as_declared(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array.astype("int32" if name == "marks" else "float32") for name, array in arrays.items()}


def assert_same_state(one: Stream, other: Stream) -> None:
    found, wanted = one.state(), other.state()
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in wanted.items()
    }


TABLE = r"frames float32 \['L', 'B', 3\], marks int32 \['B', 'L'\], gain float32 \[3\]"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gain": None}, f"inputs lack gain, expected {TABLE}; add it"),
        ({"obs": 1}, f"inputs hold 'obs', expected {TABLE}; take it out"),
        ({"frames": None, "frame": 1}, f"inputs hold 'frame', expected {TABLE}; did you mean 'frames'?"),
        ({"frames": None, "pixels": 1}, f"inputs hold 'pixels', expected {TABLE}; take it out"),
        ({"valid": [4, 4, 4]}, f"inputs hold 'valid', expected {TABLE}"),
        ({"frames": np.zeros((4 + AHEAD, B, FRAME), bool)}, "frames is bool, expected float32; convert it"),
        ({"frames": np.zeros((4 + AHEAD, B, FRAME), complex)}, "frames is complex128, expected float32"),
        ({"marks": np.zeros((B, 4))}, "marks is float64, expected int32"),
        ({"marks": np.full((B, 4), 2**31)}, "marks holds 2147483648 … 2147483648, expected values of int32"),
        ({"marks": "text"}, "marks is <U4, expected int32"),
        ({"frames": np.zeros((4 + AHEAD, B))}, r"frames has shape \[6, 3\], expected \[4 \+ 2, 3, 3\]"),
        ({"frames": np.zeros((4 + AHEAD, B - 1, FRAME))}, r"frames has shape \[6, 2, 3\], expected \[.* \+ 2, 3, 3\]"),
        ({"frames": np.zeros((AHEAD, B, FRAME))}, r"frames has shape \[2, 3, 3\], expected .* T of at least 1"),
        ({"frames": np.zeros((4, B, FRAME))}, r"marks has shape \[3, 4\], expected \[3, 2\], with the same T"),
        ({"gain": np.ones(4)}, r"gain has shape \[4\], expected \[3\]; reshape it$"),
        ({"gain": [[1.0], [1.0, 2.0]]}, "gain have rows of different lengths"),
    ],
)
def test_what_does_not_fit_the_table_is_refused(model_of, changes, said):
    stream, fitting = model_of("looking").stream(), as_declared(FRAMES)
    given = {name: value for name, value in {**fitting, **changes}.items() if value is not None}
    for call in (stream.run, stream.feed, stream.run):  # the last one after segments that fitted
        steps = stream.state()["steps"]
        with pytest.raises(UsageError, match=said):
            call(given)
        np.testing.assert_array_equal(stream.state()["steps"], steps, "nothing was run")
        stream.run(fitting)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    kind=st.sampled_from(["recurrent", "growing", "counting", "words first", "time first", "lockstep"]),
    calls=st.lists(st.tuples(st.integers(1, 5), st.integers(-1, VOCABULARY), st.booleans(), st.booleans()), max_size=6),
)
def test_segments_like_earlier_ones_are_checked_and_run_as_if_they_were_the_first(model_of, kind, calls):
    """The other stream is given what is no dict, which is checked in full each time."""
    quick, full = model_of(kind).stream(), model_of(kind).stream()
    for length, value, turned, typed in calls:
        given = {
            entry.name: np.full(entry.sizes(B, length), value, entry.dtype if typed else np.int64)
            for entry in model_of(kind).manifest.given
        }
        if turned:
            given = {name: np.asfortranarray(array) for name, array in given.items()}
        answers = []
        for stream, inputs in ((quick, given), (full, MappingProxyType(given))):
            try:
                answers.append({name: array.tobytes() for name, array in stream.run(inputs).items()})
            except UsageError as error:
                answers.append(str(error))
        assert answers[0] == answers[1]
    assert_same_state(quick, full)


def test_a_stream_of_fewer_sequences_checks_segments_anew(model_of):
    stream, manifest = model_of("recurrent").stream(), model_of("recurrent").manifest
    for b in (B, 2):
        given = {entry.name: np.zeros(entry.sizes(b, 1), entry.dtype) for entry in manifest.given}
        found = stream.run(given)
        assert {entry.name: entry.sizes(b, 1) for entry in manifest.outputs} == {n: a.shape for n, a in found.items()}
        stream.select([1, 0])
        if b > 2:
            with pytest.raises(UsageError, match=r"expected \[2"):
                stream.run(given)


def test_what_a_segment_returned_stays_and_what_it_was_given_may_change(model_of):
    stream, other = model_of("recurrent").stream(), model_of("recurrent").stream()
    given = {entry.name: np.ones(entry.sizes(B, 1), entry.dtype) for entry in stream._manifest.given}
    kept = []
    for step in range(4):
        kept.append((stream.run(given), {name: array.copy() for name, array in given.items()}))
        for array in given.values():
            array[...] = step % 2
    for found, inputs in kept:
        for name, array in other.run(MappingProxyType(inputs)).items():
            np.testing.assert_array_equal(found[name], array)


def test_a_message_speaks_of_positions_only_where_an_input_has_any(model_of):
    stream = model_of("one by one").stream()
    for wrong, todo in (
        (np.zeros(B - 1, int), "the stream has 3 sequences, model"),
        (np.zeros((B, 1), int), "reshape it"),
    ):
        with pytest.raises(UsageError, match=rf"^words has shape .*, expected \[3\]; {todo}"):
            stream.run({"words": wrong})


def test_inputs_that_are_no_mapping_are_refused(model_of):
    with pytest.raises(UsageError, match=f"inputs are a ndarray, expected a dict of arrays, {TABLE}"):
        model_of("looking").stream().run(np.zeros(3))


def test_other_floats_and_whole_numbers_are_converted(model_of):
    given = {**FRAMES, "frames": np.ones((6, B, FRAME), np.float16), "gain": [1, 2, 3]}
    found = model_of("looking").stream().run(given)["near"]
    assert found.dtype == np.float32
    assert found[0, 0].tolist() == [3, 6, 9]
    given = {**FRAMES, "frames": np.full((6, B, FRAME), np.inf)}
    assert np.isinf(model_of("looking").stream().run(given)["near"]).all(), "what is not finite is the model's business"


def test_ids_are_checked_where_they_count(model_of):
    tokens = np.zeros((B, 4), np.int64)
    tokens[1, 2] = VOCABULARY
    with pytest.raises(UsageError, match=r"tokens hold id 11 at \[1, 2\], expected 0 … 10; check the vocabulary"):
        model_of("counting").stream().run({"tokens": tokens})
    model_of("counting").stream().run({"tokens": tokens}, [4, 2, 0])


def test_ids_of_a_segment_are_checked_though_one_like_it_was_good(model_of):
    stream, tokens = model_of("counting").stream(), np.zeros((B, 4), np.int32)
    stream.run({"tokens": tokens})
    before = stream.state()["seen"]
    for wrong in (VOCABULARY, -1):
        tokens[1, 2] = wrong
        for _ in range(2):
            with pytest.raises(UsageError, match=rf"tokens hold id {wrong} at \[1, 2\], expected 0 … 10"):
                stream.run({"tokens": tokens})
    np.testing.assert_array_equal(stream.state()["seen"], before, "nothing was run")


def test_what_does_not_count_is_cleared_in_a_copy(model_of):
    given = {"obs": np.ones((B, 4, FEATURES), np.float32), "starts": np.ones(B, bool)}
    model_of("recurrent").stream().run(given, [4, 0, 4])
    assert all(array.all() for array in given.values()), "the caller's arrays are as they were"


@pytest.mark.parametrize(
    ("kind", "inputs", "lengths", "said"),
    [
        ("looking", {**FRAMES, "frames": np.zeros((5, B, FRAME)), "marks": np.zeros((B, 3), int)}, None,
         "inputs have 3 positions, expected 2 or 4, because this model takes whole segments alone"),
        ("looking", FRAMES, [4, 3, 0], r"lengths are \[4, 3, 0\], expected 0 or 4 each"),
        ("looking", FRAMES, [4, 5, 0], r"lengths are \[4, 5, 0\], expected 3 whole numbers of 0 … 4"),
        ("growing", {"tokens": np.zeros((B, 2), int)}, [2, 0, 2],
         r"lengths are \[2, 0, 2\] within a segment, expected all sequences to run or none, because .* in lockstep"),
        ("counting", {"tokens": np.zeros((B, 5), int)}, None,
         "inputs have 5 positions, expected at most one segment of 4; use feed for more"),
    ],
)  # fmt: skip
def test_what_is_no_segment_of_the_model_is_refused(model_of, kind, inputs, lengths, said):
    with pytest.raises(UsageError, match=said):
        model_of(kind).stream().run(inputs, lengths)


@pytest.mark.parametrize("kind", ["counting", "words first", "time first", "one by one", "lockstep"])
def test_token_models_step_feed_score_and_generate_whatever_their_layout(model_of, kind):
    model = model_of(kind)
    start = np.linspace(0, 1, VOCABULARY) if kind == "counting" else 0.0
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (B, 10))
    expected = spoken(tokens, start)
    longest = model.segment_lengths[0]
    stepped = model.stream().step(tokens[:, :longest])
    np.testing.assert_allclose(stepped, expected[:, :longest], rtol=0, atol=1e-6)
    fed = model.stream().feed(tokens)
    assert fed.dtype == np.float32
    np.testing.assert_allclose(fed, expected, rtol=0, atol=1e-6)
    assert model.stream().feed(tokens, last=True).tobytes() == fed[:, -1].tobytes()
    targets = -np.take_along_axis(expected[:, :-1], tokens[:, 1:, None], axis=2)[..., 0]
    np.testing.assert_allclose(model.stream().score(tokens), targets, rtol=0, atol=1e-6)
    if kind != "lockstep":
        found, lengths = model.stream().score(tokens, [10, 0, 5]), np.array([9, 0, 4])
        counted = np.arange(9) < lengths[:, None]
        np.testing.assert_allclose(found, np.where(counted, targets, 0), rtol=0, atol=1e-6)
    stream = model.stream()
    drawn = np.stack(list(stream.generate(tokens, 4, temperature=0)), axis=1)
    again = spoken(np.concatenate([tokens, drawn], axis=1), start)[:, 9:13].argmax(axis=2)
    assert drawn.tolist() == again.tolist()
    assert model.stream().generate(tokens, 3, seed=1).__next__().shape == (B,)


def test_a_sequence_that_stopped_is_fed_on_in_lockstep_and_idle_elsewhere(model_of):
    tokens = np.array([[1, 1], [2, 2], [3, 3]])
    for kind, counts in (("words first", [2, 5, 5]), ("lockstep", [5, 5, 5])):
        stream = model_of(kind).stream()
        drawn = list(stream.generate(tokens, 4, temperature=0, stop_tokens=[1]))
        assert [token.tolist() for token in drawn] == [[1, 2, 3]] * 4
        assert stream.state()["seen"].sum(axis=0).tolist() == counts


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("recurrent", r"takes token ids alone, but this model reads obs \(feature\), starts \(feature\); use run"),
        ("looking", r"takes token ids alone, but this model reads frames \(feature\), marks \(feature\)"),
        ("growing", r"needs log-probabilities, but this model returns mean \(feature\), expected .* role logprobs"),
    ],
)
def test_what_a_model_lacks_for_tokens_is_said_by_name(model_of, kind, said):
    for call, *more in (("step",), ("feed",), ("score",), ("generate", 1)):
        with pytest.raises(UsageError, match=f"{call} {said}"):
            getattr(model_of(kind).stream(), call)(np.zeros((B, 2), int), *more)


def test_whole_segments_are_not_scored_and_not_generated_from(model_of):
    stream, tokens = model_of("whole segments").stream(), np.zeros((B, 8), int)
    for call in (lambda: stream.score(tokens), lambda: stream.generate(tokens, 1)):
        with pytest.raises(UsageError, match=r"needs a state after every token, but .* whole segments of 4; use run"):
            call()
    assert stream.feed(tokens).shape == (B, 8, VOCABULARY)
    with pytest.raises(UsageError, match="tokens have 8 positions, expected 4, because"):
        stream.step(tokens)


def test_tokens_that_look_ahead_are_no_text(model_of):
    model = model_of("words first")
    ahead = msgspec.structs.replace(model.manifest.inputs[0], lookahead=1)
    manifest = msgspec.structs.replace(model.manifest, inputs=(ahead, *model.manifest.inputs[1:]))
    stream = Stream(manifest, model.open_loop(), model.update, B)
    with pytest.raises(UsageError, match=r"step takes tokens one by one, but .* a look-ahead of 1"):
        stream.step(np.zeros((B, 4), int))


def test_memory_is_what_a_transformer_xl_has(model_of):
    stream = model_of("recurrent").stream()
    with pytest.raises(UsageError, match=r"the model carries c, count, h, seen, expected memory rows; use state\(\)"):
        stream.memory()
    assert stream.fill.tolist() == [0, 0, 0]
    assert repr(stream) == "<Stream of 3 sequences>"


def test_a_model_says_what_it_has_not(model_of):
    model = model_of("recurrent")
    assert (model.vocab_size, model.memory_length, model.segment_lengths) == (None, None, (4, 1))
    assert model.update == "replace"
    assert model_of("counting").vocab_size == VOCABULARY
    with pytest.raises(UsageError, match="update is 'ring', this bundle has programs for replace; use one"):
        load(model.bundle.path, update="ring")


def test_episode_starts_go_in_by_name(model_of):
    """An input without positions, of type bool."""
    stream = model_of("recurrent").stream()
    obs = np.random.default_rng(0).normal(size=(B, 4, FEATURES))
    assert stream.run({"obs": obs, "starts": [True, False, True]})["known"].tolist() == [False] * B
    assert stream.run({"obs": obs, "starts": [False] * B})["known"].tolist() == [True, False, True]
    with pytest.raises(UsageError, match="starts is int64, expected bool"):
        stream.run({"obs": obs, "starts": [1, 0, 1]})
