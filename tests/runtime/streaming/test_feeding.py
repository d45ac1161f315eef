"""Named arrays of any length: cut where the model allows it, each with its look-ahead, and put together again."""

from __future__ import annotations

import numpy as np
import pytest
from frozen import frozen
from msgspec.structs import replace
from stand_ins.steps import AHEAD, FRAME, looking, speaking, spoken, write
from step_models import VOCABULARY, B, counting
from txl_runtime import UsageError, load
from txl_runtime.bundle.tables import Output
from txl_runtime.sessions import Limits, Request
from txl_runtime.sessions.request_checks import check_request
from txl_runtime.streaming.feeding import feed_arrays
from txl_runtime.streaming.inputs import Segments
from txl_runtime.streaming.partial import Parts


def opened(model, tmp_path, **fields):
    return load(write(model, tmp_path / "own.txl", **fields), backend="cpu", threads=1)


def inputs_of(columns: int, seed: int = 0) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(seed)
    return {
        "frames": draws.integers(-9, 9, (columns + AHEAD, B, FRAME)).astype(np.float32),
        "marks": draws.integers(0, 99, (B, columns)),
        "gain": np.array([1, 2, 0.5], np.float32),
    }


def near_of(inputs: dict[str, np.ndarray]) -> np.ndarray:
    frames = inputs["frames"]
    columns = len(frames) - AHEAD
    return sum(frames[shift : shift + columns] for shift in range(AHEAD + 1)) * inputs["gain"]


def steps_of(columns: int) -> np.ndarray:
    """Return the counter of steps at each position, with segments of 4 and then of 2."""
    whole = columns - columns % 4
    return np.array([first // 4 * 4 if first < whole else whole for first in range(columns)])


@pytest.mark.parametrize("columns", [2, 4, 6, 8, 10, 14])
def test_windows_overlap_by_the_look_ahead_and_advance_by_a_segment(tmp_path, columns):
    stream, inputs = opened(looking(), tmp_path).stream(), inputs_of(columns)
    found = stream.feed(inputs)
    assert list(found) == ["near", "marked", "sum"]
    np.testing.assert_array_equal(found["near"], near_of(inputs))
    np.testing.assert_array_equal(found["marked"], inputs["marks"] + steps_of(columns))
    total = inputs["frames"][:columns].sum(axis=0) - 1
    np.testing.assert_array_equal(found["sum"], total, err_msg="an output without positions is the last segment's")
    np.testing.assert_array_equal(stream.state()["sum"], total)
    assert stream.state()["steps"].tolist() == [[columns] * B]


def test_what_does_not_count_is_zero_and_changes_nothing(tmp_path):
    model, inputs = opened(looking(), tmp_path), inputs_of(10)
    lengths = [10, 4, 0]
    poisoned = {name: array.astype(np.float64) for name, array in inputs.items()} | {"marks": inputs["marks"].copy()}
    for row, count in enumerate(lengths):
        poisoned["frames"][count + AHEAD if count else 0 :, row] = np.nan
        poisoned["marks"][row, count:] = 2**31 - 1
    clean, dirty = model.stream(), model.stream()
    expected, found = clean.feed(inputs, lengths), dirty.feed(poisoned, lengths)
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes()
    assert not found["near"][4:, 1].any()
    assert not found["near"][:, 2].any()
    assert not found["sum"][2].any()
    assert clean.state()["sum"].tobytes() == dirty.state()["sum"].tobytes()
    assert clean.state()["sum"][2].tolist() == [-1] * FRAME, "an idle sequence is what it was"
    single = model.stream()
    alone = single.feed({**inputs, "frames": inputs["frames"][: 4 + AHEAD], "marks": inputs["marks"][:, :4]})
    assert alone["sum"][1].tobytes() == expected["sum"][1].tobytes(), "as many segments as the sequence had"


@pytest.mark.parametrize(
    ("columns", "lengths", "said"),
    [
        (3, None, r"there are 3 positions .*, of which 1 remain .* segments of 2 or 4 add up to"),
        (1, None, r"there are 1 positions .*, of which 1 remain"),
        (6, [6, 4, 2], r"lengths are \[6, 4, 2\], expected 0, 4 or 6 each, because .* whole segments"),
        (4, [4, 2, 0], r"lengths are \[4, 2, 0\], expected 0 or 4 each"),
    ],
)
def test_what_no_segments_add_up_to_is_refused_and_nothing_was_run(tmp_path, columns, lengths, said):
    stream = opened(looking(), tmp_path).stream()
    with pytest.raises(UsageError, match=said):
        stream.feed(inputs_of(columns), lengths)
    assert stream.state()["steps"].tolist() == [[0] * B]


def test_a_model_that_takes_any_length_is_cut_as_tokens_are(tmp_path):
    model = opened(counting(), tmp_path)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (B, 11))
    lengths = [11, 6, 0]
    named = model.stream().feed({"tokens": tokens}, lengths)
    assert list(named) == ["logits"]
    assert named["logits"].tobytes() == model.stream().feed(tokens, lengths).tobytes()
    last = model.stream().feed({"tokens": tokens}, lengths, last=True)["logits"]
    assert last.tobytes() == model.stream().feed(tokens, lengths, last=True).tobytes()
    assert last[1].tobytes() == named["logits"][1, 5].tobytes()
    assert not last[2].any()


def test_a_transformer_xl_takes_arrays_by_name_too():
    model = load(frozen("ring"), backend="cpu", threads=1)
    tokens, lengths = np.random.default_rng(0).integers(0, 41, (B, 11)), [11, 6, 0]
    expected = model.stream().feed(tokens, lengths)
    stream = model.stream()
    assert stream.feed({"tokens": tokens}, lengths)["logprobs"].tobytes() == expected.tobytes()
    last = model.stream().feed(tokens, lengths, last=True)
    assert last.shape == (B, 41)
    np.testing.assert_allclose(last[:2], expected[[0, 1], [10, 5]], rtol=0, atol=2e-6)
    assert not last[2].any()
    again, other = model.stream(), model.stream()
    tried = again.run({"tokens": tokens[:, :4]}, [4, 2, 0], commit=False)
    assert tried["logprobs"].tobytes() == other.step(tokens[:, :4], [4, 2, 0]).tobytes()
    assert again.fill.tolist() == [0, 0, 0]
    assert again.run({"tokens": tokens[:, :4]}, [4, 2, 0])["logprobs"].tobytes() == tried["logprobs"].tobytes()
    assert again.fill.tolist() == [4, 2, 0]
    with pytest.raises(UsageError, match="inputs have 5 positions, expected at most one segment of 4; use feed"):
        again.run({"tokens": tokens[:, :5]})


@pytest.mark.parametrize("order", [("B", "L"), ("L", "B")])
def test_an_axis_of_positions_may_stand_anywhere(tmp_path, order):
    model = opened(speaking(order), tmp_path)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (B, 6))
    found = model.stream().feed({"words": tokens if order[0] == "B" else tokens.T})["next"]
    if order[0] == "L":
        found = found.swapaxes(0, 1)
    np.testing.assert_allclose(found, spoken(tokens), rtol=0, atol=1e-6)


def test_what_has_two_axes_of_positions_is_not_cut(tmp_path):
    model = opened(looking(), tmp_path)
    pairs = Output(name="pairs", dtype="float32", shape=("B", "L", "L"))
    manifest = replace(model.manifest, outputs=(*model.manifest.outputs, pairs))

    def run(inputs: dict, counts: np.ndarray) -> dict:
        raise AssertionError("nothing runs before it is refused")

    with pytest.raises(UsageError, match=r"pairs has shape .*, expected one axis of positions to cut along; run its"):
        feed_arrays(Segments(manifest).check(inputs_of(6), None, B), manifest, B, run, False)

    def asked(columns: int) -> Request:
        inputs = inputs_of(columns)
        return Request(inputs=inputs | {"frames": inputs["frames"][:, :1], "marks": inputs["marks"][:1]})

    parts = Parts(manifest, manifest.states_of(model.update))
    with pytest.raises(UsageError, match=r"pairs has shape .*, expected one axis of positions to cut along; give each"):
        check_request(asked(6), manifest, Limits(), parts)
    assert check_request(asked(4), manifest, Limits(), parts).columns == 4, "one segment is not cut"
