"""The loop on a device of steps that return their whole state, against the one on the CPU: every bit the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import step_models
from random_operations import Case, Play
from stand_ins.engine import open_stand_in
from step_models import FEATURES, MODELS, VOCABULARY, B
from txl_runtime import BackendError, Model, UsageError, load
from txl_runtime.device import choosing
from txl_runtime.streaming.state import RowState

every = pytest.mark.parametrize("kind", MODELS)


@pytest.fixture
def opened(tmp_path, monkeypatch) -> Callable[..., tuple[Model, Model]]:
    """A model on a stand-in device, and on the CPU."""

    def open_both(kind: str, **options: Any) -> tuple[Model, Model]:
        path = tmp_path / f"{kind}.txl"
        if not path.exists():
            MODELS[kind]().write(path)
        monkeypatch.setattr(
            choosing, "open_device", lambda name, bundle, rule: open_stand_in(bundle, rule, name, **options)
        )
        return load(path, backend="rtx"), load(path, backend="cpu", threads=1)

    return open_both


def draw_inputs(kind: str, draws: np.random.Generator, b: int, length: int) -> dict[str, np.ndarray]:
    if kind == "recurrent":
        obs = draws.normal(size=(b, length, FEATURES)).astype(np.float32)
        return {"obs": obs, "starts": draws.random(b) < 0.2}
    return {"tokens": draws.integers(0, VOCABULARY, (b, length)).astype(np.int32)}


def draw_segment(kind: str, draws: np.random.Generator, b: int = B) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Inputs, and how many positions of each sequence count; some are idle where the model allows it."""
    length = 2 if kind == "growing" else int(draws.integers(1, 5)) if kind == "counting" else int(draws.choice([1, 4]))
    if kind == "counting":
        counts = draws.integers(0, length + 1, b)
    else:
        counts = np.full(b, length)
        if kind == "recurrent":
            counts[draws.random(b) < 0.3] = 0
    return draw_inputs(kind, draws, b, length), counts.astype(np.int32)


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


def assert_alike(ours: Any, theirs: Any) -> None:
    for row in range(B):
        assert_same(ours.take(row).tensors, theirs.take(row).tensors)


@pytest.mark.parametrize("kind", ["recurrent", "counting"])
def test_engines_of_steps_that_leave_b_open_are_of_the_bundle_s_b(opened, tmp_path, kind):
    """So they compute what the CPU does with graphs of that B, to the bit."""
    _, fixed = opened(kind)
    path = MODELS[kind]().leave_open().write(tmp_path / "open.txl")
    device = load(path, backend="rtx")
    assert all(program.open_batch for program in device.manifest.programs)
    backend: Any = device.backend
    assert not any(program.open_batch for program in backend.programs)
    Play(Case(kind, "replace", path, fixed, 0.0), device, 4).go(40)


@every
def test_a_segment_that_was_looked_at_is_committed_afterwards(opened, kind):
    model, _ = opened(kind)
    draws, one, other = np.random.default_rng(3), model.open_loop(), model.open_loop()
    for _ in range(5):
        inputs, counts = draw_segment(kind, draws)
        one.run(inputs, counts, commit=False).outputs()
        written = {state.name: (state.axes, array.copy()) for state, array in one.written()}
        one.commit()
        assert not one.written()
        for row in np.flatnonzero(counts).tolist():
            held = {name: array.tobytes() for name, array in one.take(row).tensors.items()}
            assert held == {name: axes.one(array, row).tobytes() for name, (axes, array) in written.items()}
        other.run(inputs, counts)
        assert_alike(one, other)
        assert written.keys() <= {state.name for state in model.manifest.states}
        assert bool(written) == bool(counts.any())


@pytest.mark.parametrize("kind", ["recurrent", "counting"])
def test_a_part_of_a_segment_runs_again_from_the_state_before_it(opened, kind):
    model, on_the_host = opened(kind)
    draws, one, other, third = np.random.default_rng(3), model.open_loop(), model.open_loop(), on_the_host.open_loop()
    log, parts = model.backend.driver.log, 0
    for _ in range(30):
        inputs, ran = draw_segment(kind, draws)
        most = np.minimum(ran, 1) if kind == "recurrent" else ran
        counts = draws.integers(0, most + 1).astype(np.int32)
        for loop in (one, third):
            loop.run(inputs, ran, commit=False).outputs()
        done = len(log)
        for loop in (one, third):
            loop.commit(counts)
            loop.commit()
        one.finish()
        again = [name for name in log[done:] if name.startswith("run")]
        assert len(again) == bool(counts.any() and (counts != ran).any())
        parts += len(again)
        if counts.any():
            other.run(other.parts.inputs(inputs, counts), counts)
        assert_alike(one, other)
        assert_alike(one, third)
    assert parts > 10


@every
def test_a_part_that_fails_leaves_the_state_before_the_segment(opened, kind):
    model, _ = opened(kind)
    draws, one, other = np.random.default_rng(3), model.open_loop(), model.open_loop()
    length = 2 if kind == "growing" else 4
    for _ in range(3):
        inputs, counts = draw_inputs(kind, draws, B, length), np.full(B, length, np.int32)
        for loop in (one, other):
            loop.run(inputs, counts).outputs()
    one.run(draw_inputs(kind, draws, B, length), counts, commit=False).outputs()
    part = np.ones(B, np.int32)
    model.backend.driver.tell("engine", BackendError("the engine stopped"), times=100)
    with pytest.raises(UsageError if kind == "growing" else BackendError, match=r"expected 0 or one of|stopped"):
        one.commit(part)
    model.backend.driver.forgive()
    assert_alike(one, other)
    if kind != "growing":  # its segments are of two positions, so one of them was refused, and the segment is there
        one.commit()
        assert_alike(one, other)


def test_a_state_grows_program_by_program_and_starts_anew_with_a_reset(opened):
    model, _ = opened("growing")
    loop, log, draws = model.open_loop(), model.backend.driver.log, np.random.default_rng(0)
    for _ in range(2):
        for _ in range(5):
            loop.run(*draw_segment("growing", draws)).outputs()
        loop.clear(np.arange(B))
    ran = [name.removeprefix("run ").removesuffix(" (recorded)") for name in log if name.startswith("run")]
    assert ran == 2 * ["step-2.0", "step-2.1", "step-2.2", "step-2.3", "step-2.3"]
    assert loop.take(0).tensors.keys() == {"clock", "rows"}, "the summary is absent"
    assert loop.take(0).tensors["rows"].shape == (0, 4)


def test_only_what_was_asked_for_comes_back_and_no_state_does(opened):
    model, _ = opened("recurrent")
    loop, driver, draws = model.open_loop(), model.backend.driver, np.random.default_rng(0)

    def segment() -> Any:
        return loop.run(draw_inputs("recurrent", draws, 2, 4), np.full(2, 4, np.int32))

    segment().outputs()
    before = driver.bytes_copied
    segment()._bring(["known"])
    inputs = -(-B * 4 * FEATURES * 4 // 256) * 256 + 2 * 256
    assert driver.bytes_copied - before == inputs + 2
    before = driver.bytes_copied
    segment().outputs()
    asked = 2 * (2 * 4 * 2 * 4) + 2 * 4 * 4 + 2
    assert inputs + asked <= driver.bytes_copied - before <= inputs + 4 * 256, "neighbours come in one copy"


def test_the_states_of_one_sequence_are_moved_alone(opened):
    model, _ = opened("recurrent")
    loop, driver, draws = model.open_loop(), model.backend.driver, np.random.default_rng(0)
    loop.run(draw_inputs("recurrent", draws, B, 4), np.full(B, 4, np.int32)).outputs()
    before, one = driver.bytes_copied, 2 * step_models.WIDTH * 4 + 4 + 1
    taken = loop.take(1)
    assert driver.bytes_copied - before == one
    assert_same(loop.take(1, ["c"]).tensors, {"c": taken.tensors["c"]})
    before = driver.bytes_copied - one
    loop.put(2, taken)
    assert driver.bytes_copied - before == 2 * one


def test_a_segment_that_no_program_takes_is_refused_with_the_lengths_there_are(opened):
    loop = opened("recurrent")[0].open_loop()
    with pytest.raises(UsageError, match=r"a segment of 3 positions .* \(lengths \[1, 4\]\)"):
        loop.run(draw_inputs("recurrent", np.random.default_rng(0), B, 3), np.full(B, 3, np.int32))


def test_rows_put_with_another_number_than_are_held_go_through_the_host(opened):
    model, other = opened("growing")
    ours, theirs = model.open_loop(), other.open_loop()
    draws, kept = np.random.default_rng(0), []
    for _ in range(4):
        inputs, counts = draw_segment("growing", draws)
        for loop in (ours, theirs):
            loop.run(inputs, counts).outputs()
        kept.append(ours.take(0))
    for state in (kept[1], kept[0], kept[3]):
        for loop in (ours, theirs):
            loop.put(0, state)
        assert_alike(ours, theirs)
    too_many = {**kept[3].tensors, "rows": np.zeros((900, 4), np.float32)}
    with pytest.raises(AssertionError, match="more rows than the state has"):
        ours.put(0, RowState(0, 0, too_many))


def test_a_segment_whose_state_is_nan_did_not_happen_where_that_is_required(opened):
    stream = opened("recurrent")[0].stream()
    inputs = draw_inputs("recurrent", np.random.default_rng(3), B, 4) | {"starts": np.zeros(B, np.bool_)}
    stream.run(inputs, require_finite=True)
    state = stream.take(1)
    state.tensors["c"][:] = np.nan
    stream.put(1, state)
    before = stream.state()
    with pytest.raises(BackendError, match="of sequence 1 holds nan at"):
        stream.run(inputs, require_finite=True)
    assert_same(stream.state(), before)
    stream.reset([1])
    stream.run(inputs, require_finite=True)
