"""What the loop puts into a device's queue: as little as it can, recorded once, and never what must not be."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from support import interrupted
from txl_runtime import BackendError, Model, UsageError
from txl_runtime.device.placements import Ring
from txl_runtime.device.recording import MOST_FAILURES, MOST_RECORDS

B, V = 3, 60
INTERRUPTED = (
    "streaming",
    *(f"device/{name}" for name in ("loop", "placements", "call", "tail", "cuda_context", "cuda")),
)
both = pytest.mark.parametrize("update", ["ring", "rolled"])


def tokens_of(columns: int, seed: int = 0, rows: int = B) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, (rows, columns)).astype(np.int32)


# --- recording ----------------------------------------------------------------------------------------------------


@both
def test_a_program_is_recorded_once_per_side_of_the_memory(opened, update):
    model = opened(update)
    stream, driver = model.stream(), model.backend.driver
    for seed in range(10):
        stream.step(tokens_of(1, seed))
    sides = 1 if update == "ring" else 2
    assert driver.captured == sides
    assert driver.replayed == 10 - sides
    assert [executable.prepared for executable in model.backend.executables.values()].count(sides) == 1
    assert set(stream.loop.recorded.values()) == {"recorded"}
    assert len(stream.loop.recorded) == sides


@both
@pytest.mark.parametrize(
    ("name", "outcome"), [("cuStreamEndCapture", 901), ("engine", BackendError("900 (operation not permitted)"))]
)
def test_one_record_that_somebody_spoils_is_made_again(opened, update, name, outcome):
    model, theirs = opened(update), opened(update).stream()
    ours, driver = model.stream(), model.backend.driver
    sides = 1 if update == "ring" else 2
    for seed in range(8 * sides):
        if seed == sides:
            driver.tell(name, outcome, done=name != "engine")
        elif seed == 2 * sides:
            driver.forgive()
        tokens = tokens_of(1, seed)
        assert ours.step(tokens).tobytes() == theirs.step(tokens).tobytes()
    assert set(ours.loop.recorded.values()) == {"recorded"}
    assert driver.captured == sides


@both
def test_what_cannot_be_recorded_runs_as_it_is_and_says_so(opened, update, caplog):
    model = opened(update)
    other = opened(update)
    ours, theirs = model.stream(), other.stream()
    model.backend.driver.tell("cuStreamEndCapture", 900, times=100, done=True)
    for seed in range(12):
        assert ours.step(tokens_of(2, seed)).tobytes() == theirs.step(tokens_of(2, seed)).tobytes()
    assert all("not permitted" in said for said in ours.loop.recorded.values())
    sides = 1 if update == "ring" else 2
    assert model.backend.driver.calls["cuStreamBeginCapture_v2"] == sides * MOST_FAILURES
    assert [record.message for record in caplog.records if "without being recorded" in record.message] == [
        f"{name.partition(',')[0]} runs without being recorded: {said}" for name, said in ours.loop.recorded.items()
    ]
    held = [type(argument) for record in caplog.records for argument in record.args or ()]
    assert set(held) == {str}, "an error would hold the work, and with it the device's memory"


# --- what is moved ------------------------------------------------------------------------------------------------


@both
def test_the_memory_never_leaves_the_device_between_steps(opened, update):
    model = opened(update)
    stream, driver = model.stream(), model.backend.driver
    for seed in range(4):
        stream.step(tokens_of(1, seed))
    before, done = driver.bytes_copied, len(driver.log)
    stream.step(tokens_of(1, 9))
    fields = 4 if update == "ring" else 3
    assert driver.bytes_copied - before == fields * 256 + B * V * 4, "tokens and counts in, log-probabilities out"
    name = "run logprobs-ring-1" if update == "ring" else "run logprobs-1"
    assert driver.log[done:] == ["copy (recorded)", f"{name} (recorded)", "copy (recorded)"]


@both
def test_a_step_is_one_launch_one_event_and_one_wait(opened, update):
    model = opened(update)
    stream, driver = model.stream(), model.backend.driver
    for seed in range(4):
        stream.step(tokens_of(1, seed))
    before = driver.calls.copy()
    stream.step(tokens_of(1, 9))
    made = {name: count for name, count in (driver.calls - before).items() if not name.startswith("cuCtx")}
    assert made == {"cuGraphLaunch": 1, "cuEventRecord": 1, "cuEventSynchronize": 1}
    contexts = {name: count for name, count in (driver.calls - before).items() if name.startswith("cuCtx")}
    assert contexts == {"cuCtxGetCurrent": 2, "cuCtxPushCurrent_v2": 2, "cuCtxPopCurrent_v2": 2}


@both
def test_results_of_ever_other_sizes_are_not_each_recorded(opened, update):
    model = opened(update)
    stream, driver = model.stream(), model.backend.driver
    sides = 1 if update == "ring" else 2
    for seed in range(12):
        for columns in (2, 3, 4):
            stream.step(tokens_of(columns, seed))
    assert driver.captured == sides * 4, "one for each size that came back, and one that fetches nothing"
    loop = model.open_loop()
    for seed in range(4):
        for b in range(1, B + 1):
            for columns in (2, 3, 4):
                loop.run({"tokens": tokens_of(columns, seed, b)}, np.full(b, columns, np.int32)).rows()
    assert driver.captured == sides * (4 + MOST_RECORDS + 1)


@both
def test_an_event_serves_all_steps_of_a_stream(opened, update):
    model = opened(update)
    stream, driver = model.stream(), model.backend.driver
    stream.step(tokens_of(4))
    made = driver.calls["cuEventCreate"]
    for seed in range(5):
        stream.step(tokens_of(4, seed))
        stream.reset([0])
    assert driver.calls["cuEventCreate"] == made


def test_a_spill_moves_the_spilled_rows_alone(opened):
    model = opened("ring")
    stream, driver = model.stream(), model.backend.driver
    assert [type(placement) for placement in stream.loop.placements] == [Ring]
    moved = []
    for seed in range(12):
        stream.step(tokens_of(4, seed), [4, 3, 0])
        driver.drain()
        before = driver.bytes_copied
        stands = stream.loop.heads
        stream.step(tokens_of(1, seed), [1, 0, 0])
        driver.drain()
        spilled = max(0, int(stands[0]) + 1 - stream.loop.counters.ring)
        moved.append((driver.bytes_copied - before, spilled))
    state = model.manifest.states_of("ring")[0]
    row = state.shape[1] * state.shape[3] * 4 * len(model.manifest.states_of("ring"))
    plain = 4 * 256 + B * V * 4
    assert {copied - plain - spilled * row for copied, spilled in moved} == {0}


@both
def test_only_what_was_asked_for_comes_back(opened, update):
    model = opened(update)
    stream, driver = model.stream(2), model.backend.driver
    fields = 4 if update == "ring" else 3
    for _ in range(3):  # before any row is spilled
        before = driver.bytes_copied
        stream.step(tokens_of(3, rows=2))
        assert driver.bytes_copied - before == fields * 256 + 2 * 3 * V * 4


@both
def test_prompts_and_scores_run_the_programs_made_for_them(opened, update):
    model = opened(update)
    stream, log = model.stream(), model.backend.driver.log
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
    memory = model.backend.driver.memory
    stream = model.stream()
    for _ in range(3):
        stream.feed(tokens_of(9))
    assert memory.used("device") > 0
    assert memory.used("pinned") > 0
    gc.disable()  # nothing that a stream holds holds the stream
    try:
        del stream
        assert memory.used("device") == memory.used("pinned") == 0
    finally:
        gc.enable()


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
@pytest.mark.parametrize("name", ["cuGraphLaunch", "cuEventRecord", "cuCtxPushCurrent_v2"])
def test_a_step_that_fails_changes_nothing(opened, update, name):
    model = opened(update)
    ours, theirs = model.stream(), opened(update).stream()
    for stream in (ours, theirs):
        stream.feed(tokens_of(6))
    model.backend.driver.tell(name, 719)
    with pytest.raises(BackendError, match="719"):
        ours.step(tokens_of(2, 1))
    assert ours.fill.tolist() == theirs.fill.tolist()
    assert ours.step(tokens_of(2, 2)).tobytes() == theirs.step(tokens_of(2, 2)).tobytes()


@both
def test_wrong_tokens_are_refused_as_everywhere(opened, update):
    stream = opened(update).stream()
    for bad in ([[1, 2]], [[V]] * B, [[0.5]] * B, np.zeros((B, 5), int)):
        with pytest.raises(UsageError):
            stream.step(bad)


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


# --- what goes wrong in mid-step ------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("kind", ["cuMemAlloc", "cuMemHostAlloc"])
def test_c9_an_allocation_that_fails_can_be_tried_again(opened, update, kind):
    model, other = opened(update), opened(update)
    driver, ours, theirs = model.backend.driver, model.stream(), other.stream()
    failed = 0
    while True:
        driver.tell(kind, 2, after=failed)
        with suppress(BackendError):
            found = ours.step(tokens_of(3, 5))
            break
        driver.forgive()
        failed += 1
    driver.forgive()
    assert failed == 2, "inputs and results on the device; inputs and results on the host"
    assert found.tobytes() == theirs.step(tokens_of(3, 5)).tobytes()
    assert ours.step(tokens_of(3, 6)).tobytes() == theirs.step(tokens_of(3, 6)).tobytes()
    assert ours.fill.tolist() == theirs.fill.tolist()


@both
@pytest.mark.parametrize("done", [False, True])
def test_c10_an_interrupt_while_the_device_works_leaves_the_state_after_the_step(opened, update, done):
    model, other = opened(update), opened(update)
    ours, theirs = model.stream(), other.stream()
    for stream in (ours, theirs):
        stream.step(tokens_of(1, 9))
    for seed in range(5):
        tokens = tokens_of(4, seed)
        theirs.step(tokens)
        model.backend.driver.tell("cuEventSynchronize", KeyboardInterrupt, done=done)
        with pytest.raises(KeyboardInterrupt):
            ours.step(tokens)
        assert ours.fill.tolist() == theirs.fill.tolist()
        assert ours.snapshot().head.tolist() == theirs.snapshot().head.tolist()
        assert ours.step(tokens_of(1, 50)).tobytes() == theirs.step(tokens_of(1, 50)).tobytes()
    assert all(ours.memory()[name].tobytes() == rows.tobytes() for name, rows in theirs.memory().items())


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


@both
def test_a_segment_that_was_looked_at_is_committed_afterwards(opened, update):
    """All that a commit does then is to move spilled rows; nothing is run again."""
    model = opened(update)
    one, other = model.open_loop(), opened(update).open_loop()
    driver, counts = model.backend.driver, np.array([4, 3, 0], np.int32)
    for seed in range(9):
        tokens = {"tokens": tokens_of(4, seed)}
        one.run(tokens, counts, commit=False).rows()
        before = driver.calls.copy()
        one.commit()
        made = driver.calls - before
        assert not {name for name in made if not name.startswith(("cuCtx", "cuMemcpy2D", "cuEventRecord"))}
        one.commit()  # it is done
        other.run(tokens, counts)
        assert one.fill.tolist() == other.fill.tolist()
        assert one.heads.tolist() == other.heads.tolist()
    for row in range(B):
        mine, theirs = one.take(row).tensors, other.take(row).tensors
        assert all(mine[name].tobytes() == theirs[name].tobytes() for name in theirs)


@both
def test_a_segment_in_which_nothing_counts_asks_nothing_of_the_device(opened, update):
    model = opened(update)
    loop, driver = model.open_loop(), model.backend.driver
    for seed in range(3):
        loop.run({"tokens": tokens_of(2, seed)}, np.full(B, 2, np.int32)).rows()
    before, fill = driver.calls.copy(), loop.fill.tolist()
    found = loop.run({"tokens": tokens_of(2)}, np.zeros(B, np.int32))
    assert (found.rows().shape, found.rows().any()) == ((B, 2, V), False)
    assert not found.outputs()["logprobs"].any()
    assert driver.calls == before
    assert loop.fill.tolist() == fill


@both
def test_a_sequence_that_is_named_twice_is_reset_once_and_no_other_is(opened, update):
    model = opened(update)
    one, other = model.stream(), model.stream()
    for stream, rows in ((one, [1, 1, 0]), (other, [0, 1])):
        stream.feed(tokens_of(6))
        stream.reset(rows)
    assert one.fill.tolist() == other.fill.tolist() == [0, 0, 6]
    assert one.step(tokens_of(2)).tobytes() == other.step(tokens_of(2)).tobytes()


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


def taken(lock: Any) -> bool:
    """Whether another thread would wait for a lock."""
    free: list[bool] = []

    def other() -> None:
        free.append(lock.acquire(blocking=False))
        if free[0]:
            lock.release()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    return not free[0]


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
        reached = interrupted(lambda: stream.step(tokens), line, *INTERRUPTED)
        assert not taken(model.backend.lock), f"the lock is held for ever, interrupted at line {line}"
        model.backend.driver.unwind()  # a signal may come before the first line of what leaves a context
        if not reached:
            break
        found = stream.step(further).tobytes()
        assert found in (before, after), f"neither before nor after the step, interrupted at line {line}"
        seen.add(found)
    assert seen == {before, after}


@both
def test_closing_the_model_gives_the_devices_memory_back_at_once(opened, update):
    """Whoever still has a stream, a generation that is not over and a result; without the collector's help."""
    gc.collect()
    gc.disable()
    try:
        model = opened(update)
        driver, streams = model.backend.driver, [model.stream(), model.stream(1)]
        rows = streams[0].feed(tokens_of(4))
        drawn = streams[1].generate([7], 5, seed=3, feed_last=True)
        next(drawn)
        assert driver.memory.used() > 0
        model.close()
        assert driver.held() == []
        with pytest.raises(UsageError, match="the model was closed"):
            next(drawn)
        assert rows.shape == (B, 4, V)
    finally:
        gc.enable()
