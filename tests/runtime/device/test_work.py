"""What the loop puts into a device's queue: as little as it can, recorded once, and never what must not be."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from stand_ins.engine import DeviceArray, open_stand_in, refuse
from support import interrupted
from txl_runtime import BackendError, Model, UsageError, load
from txl_runtime.device import choosing
from txl_runtime.device.dtypes import from_float32, to_float32
from txl_runtime.device.memory import DeviceRing

B, V = 3, 60
both = pytest.mark.parametrize("update", ["ring", "rolled"])


@pytest.fixture
def opened(make_bundle, monkeypatch):
    """A fresh model on a stand-in device."""

    def open_it(update: str, **options: Any) -> Model:
        monkeypatch.setattr(
            choosing, "open_device", lambda name, bundle, rule: open_stand_in(bundle, rule, name, **options)
        )
        return load(make_bundle(batch_size=B, config={}), backend="rtx", update=update)

    return open_it


def tokens_of(columns: int, seed: int = 0, rows: int = B) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, (rows, columns)).astype(np.int32)


# --- recording ----------------------------------------------------------------------------------------------------


@both
def test_a_program_is_recorded_once_per_side_of_the_memory(opened, update):
    model = opened(update)
    stream, queue = model.stream(), model.backend.queue
    for seed in range(10):
        stream.step(tokens_of(1, seed))
    sides = 1 if update == "ring" else 2
    assert queue.captured == sides
    assert queue.replayed == 10 - sides
    assert [executable.prepared for executable in model.backend.executables.values()].count(sides) == 1
    assert set(stream.loop.recorded.values()) == {"recorded"}
    assert len(stream.loop.recorded) == sides


@both
def test_what_cannot_be_recorded_runs_as_it_is_and_says_so(opened, update):
    model = opened(update)
    model.backend.queue.capture = refuse("cudaStreamEndCapture failed: not permitted")
    other = opened(update)
    ours, theirs = model.stream(), other.stream()
    for seed in range(6):
        assert ours.step(tokens_of(2, seed)).tobytes() == theirs.step(tokens_of(2, seed)).tobytes()
    assert all("not permitted" in said for said in ours.loop.recorded.values())


# --- what is moved ------------------------------------------------------------------------------------------------


@both
def test_the_memory_never_leaves_the_device_between_steps(opened, update):
    model = opened(update)
    stream, queue = model.stream(), model.backend.queue
    for seed in range(4):
        stream.step(tokens_of(1, seed))
    before, done = queue.bytes_copied, len(queue.log)
    stream.step(tokens_of(1, 9))
    fields = 4 if update == "ring" else 3
    assert queue.bytes_copied - before == fields * 256 + B * V * 4, "tokens and counts in, log-probabilities out"
    name = "run logprobs-ring-1" if update == "ring" else "run logprobs-1"
    assert queue.log[done:] == ["copy", f"{name} (recorded)", "copy"]


def test_a_spill_moves_the_spilled_rows_alone(opened):
    model = opened("ring")
    stream, queue = model.stream(), model.backend.queue
    memory = stream.loop.memory
    assert isinstance(memory, DeviceRing)
    moved = []
    for seed in range(12):
        stream.step(tokens_of(4, seed), [4, 3, 0])
        queue.wait()
        before = queue.bytes_copied
        stands = stream.loop.heads
        stream.step(tokens_of(1, seed), [1, 0, 0])
        queue.wait()
        spilled = max(0, int(stands[0]) + 1 - memory._ring)
        moved.append((queue.bytes_copied - before, spilled))
    state = model.manifest.states_of("ring")[0]
    row = state.shape[1] * state.shape[3] * 4 * len(model.manifest.states_of("ring"))
    plain = 4 * 256 + B * V * 4
    assert {copied - plain - spilled * row for copied, spilled in moved} == {0}


@both
def test_only_what_was_asked_for_comes_back(opened, update):
    model = opened(update)
    stream, queue = model.stream(2), model.backend.queue
    stream.step(tokens_of(3, rows=2))
    before = queue.bytes_copied
    stream.step(tokens_of(3, rows=2))
    fields = 4 if update == "ring" else 3
    assert queue.bytes_copied - before == fields * 256 + 2 * 3 * V * 4


@both
def test_prompts_and_scores_run_the_programs_made_for_them(opened, update):
    model = opened(update)
    stream, log = model.stream(), model.backend.queue.log
    ring = "-ring" if update == "ring" else ""
    stream.score(tokens_of(5))
    assert f"run score{ring}-4" in log
    next(stream.generate(tokens_of(4), 1))
    assert f"run last{ring}-4" in log
    log.clear()
    stream.score(tokens_of(2))
    assert not any("score" in name for name in log), "one row of log-probabilities is less work than a long score"


@both
def test_streams_give_their_memory_back(opened, update):
    model = opened(update)
    device = model.backend.device
    stream = model.stream()
    stream.feed(tokens_of(9))
    used = device.used
    assert used > 0
    del stream
    assert device.used == 0


# --- what is refused ----------------------------------------------------------------------------------------------


def forget(executable: Any) -> None:
    executable.in_place = {}


def declare(executable: Any) -> None:
    states = zip(executable.program.inputs[-4:], executable.program.outputs[-4:], strict=True)
    executable.in_place = {output.name: given.name for given, output in states}


def test_overlapping_input_and_output_are_refused_unless_the_engine_declares_it(opened):
    stream = opened("ring", change=forget).stream()
    with pytest.raises(BackendError, match=r"new_memory.* overlaps memory.*which the engine does not update in place"):
        stream.step(tokens_of(1))


def test_what_is_updated_in_place_has_to_be_one_buffer(opened):
    stream = opened("rolled", change=declare).stream()
    with pytest.raises(BackendError, match="is updated in place, expected it where"):
        stream.step(tokens_of(1))


@both
def test_a_step_that_fails_changes_nothing(opened, update, monkeypatch):
    model = opened(update)
    ours, theirs = model.stream(), opened(update).stream()
    for stream in (ours, theirs):
        stream.feed(tokens_of(6))
    with monkeypatch.context() as patch:
        patch.setattr(model.backend.queue, "push", refuse("the device is lost"))
        with pytest.raises(BackendError, match="the device is lost"):
            ours.step(tokens_of(2, 1))
    assert ours.fill.tolist() == theirs.fill.tolist()
    assert ours.step(tokens_of(2, 2)).tobytes() == theirs.step(tokens_of(2, 2)).tobytes()


@both
def test_wrong_tokens_are_refused_as_everywhere(opened, update):
    stream = opened(update).stream()
    for bad in ([[1, 2]], [[V]] * B, [[0.5]] * B, np.zeros((B, 5), int)):
        with pytest.raises(UsageError):
            stream.step(bad)


# --- tokens that are on the device already ------------------------------------------------------------------------


@both
def test_tokens_on_the_device_are_taken_from_there(opened, update):
    ours, theirs = opened(update), opened(update)
    device, queue = ours.backend.device, ours.backend.queue
    one, other = ours.stream(), theirs.stream()
    for seed, columns in enumerate((1, 4, 3, 11, 2, 4)):
        host = tokens_of(columns, seed)
        there = DeviceArray(device, host)
        lengths = [columns, columns // 2, columns] if seed % 2 else None
        call = "feed" if columns > 4 else "step"
        assert getattr(one, call)(there, lengths).tobytes() == getattr(other, call)(host, lengths).tobytes()
        assert there.asked_for == [queue.handle], "whoever writes them must be done before our queue reads"


@both
def test_a_part_of_an_array_on_the_device_is_taken_where_it_lies(opened, update):
    ours, theirs = opened(update), opened(update)
    host = tokens_of(9)
    there = DeviceArray(ours.backend.device, host)
    there.array = there.array[:, 3:7]
    assert ours.stream().step(there).tobytes() == theirs.stream().step(host[:, 3:7]).tobytes()


@both
def test_scores_and_prompts_take_them_too(opened, update):
    ours, theirs = opened(update), opened(update)
    host = tokens_of(7)
    there = DeviceArray(ours.backend.device, host)
    assert ours.stream().score(there).tobytes() == theirs.stream().score(host).tobytes()
    drawn = [list(m.stream().generate(t, 4, seed=1)) for m, t in ((ours, there), (theirs, host))]
    assert np.array_equal(*drawn)


@pytest.mark.parametrize("values", [np.zeros((B, 2), np.int64), np.zeros(B, np.int32), np.zeros((B, 2), np.float32)])
def test_other_arrays_on_the_device_are_refused(opened, values):
    model = opened("ring")
    with pytest.raises(UsageError, match=r"expected int32 \[b, T\]"):
        model.stream().step(DeviceArray(model.backend.device, values))


def test_wrong_shapes_on_the_device_are_refused(opened):
    model = opened("ring")
    device, stream = model.backend.device, model.stream()
    with pytest.raises(UsageError, match=r"expected \[3, T\]"):
        stream.step(DeviceArray(device, np.zeros((2, 2), np.int32)))
    with pytest.raises(UsageError, match="at most one segment of 4"):
        stream.step(DeviceArray(device, np.zeros((B, 5), np.int32)))
    transposed = DeviceArray(device, np.zeros((4, B), np.int32))
    transposed.array = transposed.array.T
    with pytest.raises(UsageError, match="strides"):
        stream.step(transposed)


# --- threads ------------------------------------------------------------------------------------------------------


@both
def test_streams_in_threads_compute_what_they_compute_alone(opened, update):
    def work(model: Model, worker: int, start: threading.Barrier | None = None) -> list[bytes]:
        draws, stream, found = np.random.default_rng(worker), model.stream(1 + worker % B), []
        if start is not None:
            start.wait(timeout=60)
        for turn in range(25):
            tokens = draws.integers(0, V, (stream.batch_size, int(draws.integers(1, 12))))
            found += [stream.feed(tokens).tobytes(), stream.score(tokens).tobytes()]
            if turn % 6 == worker:
                found.extend(token.tobytes() for token in stream.generate(tokens, 4, seed=worker))
                stream.reset([0])
        return found + [rows.tobytes() for rows in stream.memory().values()]

    alone = opened(update)
    expected = [work(alone, worker) for worker in range(4)]
    shared, start = opened(update), threading.Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(work, shared, worker, start) for worker in range(4)]
        assert [future.result(timeout=120) for future in running] == expected


# --- numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_numbers_come_back_as_the_type_holds_them(name):
    import ml_dtypes

    types = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
    values = np.random.default_rng(0).normal(size=5000).astype(np.float32) * np.float32(100)
    values[:6] = [0.0, -0.0, np.inf, -np.inf, 1.00390625, 3.3e38]
    stored = from_float32(values, name)
    with np.errstate(over="ignore"):
        expected = values.astype(types[name])
    assert stored.tobytes() == expected.tobytes()
    assert to_float32(stored, name).tobytes() == expected.astype(np.float32).tobytes()
    assert np.isnan(to_float32(from_float32(np.array([np.nan], np.float32), name), name)).all()


# --- what goes wrong in mid-step ------------------------------------------------------------------------------------


@both
def test_an_allocation_that_fails_can_be_tried_again(opened, update):
    model, other = opened(update), opened(update)
    device, ours, theirs = model.backend.device, model.stream(), other.stream()
    allowed, allocate = 0, device.allocate
    for fails_after in range(3):
        allowed = fails_after

        def scarce(size: int) -> Any:
            nonlocal allowed
            allowed -= 1
            if allowed < 0:
                raise BackendError("cudaMalloc failed: out of memory")
            return allocate(size)

        device.allocate = scarce
        with pytest.raises(BackendError, match="out of memory") if fails_after < 2 else nullcontext():
            ours.step(tokens_of(3, 5))
        device.allocate = allocate
        if fails_after == 2:
            theirs.step(tokens_of(3, 5))
    assert ours.step(tokens_of(3, 6)).tobytes() == theirs.step(tokens_of(3, 6)).tobytes()
    assert ours.fill.tolist() == theirs.fill.tolist()


@both
def test_an_interrupt_while_the_device_works_leaves_the_state_after_the_step(opened, update, monkeypatch):
    model, other = opened(update), opened(update)
    ours, theirs = model.stream(), other.stream()
    for seed in range(5):
        tokens = tokens_of(4, seed)
        theirs.step(tokens)
        with monkeypatch.context() as patch:
            patch.setattr("stand_ins.engine.StandInEvent.wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                ours.step(tokens)
        assert ours.fill.tolist() == theirs.fill.tolist()
        assert ours.snapshot().head.tolist() == theirs.snapshot().head.tolist()
        assert ours.step(tokens_of(1, 50)).tobytes() == theirs.step(tokens_of(1, 50)).tobytes()
    assert all(ours.memory()[name].tobytes() == rows.tobytes() for name, rows in theirs.memory().items())


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@both
def test_a_segment_that_is_not_committed_leaves_every_bit(opened, update):
    one, other = opened(update).open_loop(), opened(update).open_loop()
    counts = np.array([4, 3, 0], np.int32)
    for seed in range(9):
        tried = {"tokens": tokens_of(4, 100 + seed)}
        expected = one.run(tried, counts, commit=False).rows().copy()
        assert one.run(tried, counts, commit=False).rows().tobytes() == expected.tobytes()
        assert one.fill.tolist() == other.fill.tolist()
        given = [
            loop.run({"tokens": tokens_of(3, seed)}, counts - counts // 2).rows().tobytes() for loop in (one, other)
        ]
        assert given[0] == given[1]
    for row in range(B):
        mine, theirs = one.take(row), other.take(row)
        assert (mine.fill, mine.head) == (theirs.fill, theirs.head)
        assert all(mine.tensors[name].tobytes() == theirs.tensors[name].tobytes() for name in theirs.tensors)


def test_a_result_outlives_its_loop(opened):
    model, counts = opened("ring"), np.full(B, 4, np.int32)
    kept = model.open_loop()
    expected = kept.run({"tokens": tokens_of(4)}, counts).rows()
    assert model.open_loop().run({"tokens": tokens_of(4)}, counts).rows().tobytes() == expected.tobytes()


@both
def test_a_stream_that_goes_leaves_no_work_on_its_memory(opened, update):
    model = opened(update)
    stream = model.stream(1)
    stream.feed(tokens_of(6, rows=1))
    stream.reset([0])  # put into the queue, and nobody waits for it
    del stream
    model.stream().feed(tokens_of(3))


@both
def test_a_step_happens_or_does_not_wherever_it_is_interrupted(opened, update):
    """The stand-in does nothing before somebody waits: what is overwritten too early is found out."""
    model = opened(update)
    stream, tokens = model.stream(), tokens_of(4, 1)
    stream.feed(tokens_of(7))
    start, further = stream.snapshot(), tokens_of(3, 2)
    before = stream.step(further).tobytes()
    stream.restore(start)
    stream.step(tokens)
    after = stream.step(further).tobytes()
    seen, line = set(), 0
    while True:
        line += 1
        stream.restore(start)
        if not interrupted(lambda: stream.step(tokens), line, "streaming", "device/loop"):
            break
        found = stream.step(further).tobytes()
        assert found in (before, after), f"neither before nor after the step, interrupted at line {line}"
        seen.add(found)
    assert seen == {before, after}
