"""The loop's work in a device's queue: as little as it can, recorded once, and never what must not be."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from txl_runtime import BackendError, UsageError
from txl_runtime.device.placements import Ring
from txl_runtime.device.recording import MOST_FAILURES, MOST_RECORDS

B, V = 3, 41
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


# --- segments and states ------------------------------------------------------------------------------------------


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


def test_a_part_of_a_segment_moves_spilled_rows_at_most(opened):
    """A ring of a device has what it has where the part alone counted in the same program; nothing is run again."""
    model = opened("ring")
    one, other, draws = model.open_loop(), opened("ring").open_loop(), np.random.default_rng(0)
    driver, spilled = model.backend.driver, 0
    for seed in range(40):
        tokens, ran = {"tokens": tokens_of(4, seed)}, draws.integers(0, 5, B).astype(np.int32)
        counts, heads = draws.integers(0, ran + 1).astype(np.int32), one.heads
        one.run(tokens, ran, commit=False).rows()
        before = driver.calls.copy()
        one.commit(counts)
        made = driver.calls - before
        assert not {name for name in made if not name.startswith(("cuCtx", "cuMemcpy2D", "cuEventRecord"))}
        spilled += bool([name for name in made if name.startswith("cuMemcpy2D")])
        assert one.heads.tolist() == ((heads + counts) % one.counters.ring).tolist()
        one.commit(ran)  # it is done
        other.run(tokens, counts)
        assert one.fill.tolist() == other.fill.tolist()
        for row in range(B):
            mine, theirs = one.take(row).tensors, other.take(row).tensors
            assert all(mine[name].tobytes() == theirs[name].tobytes() for name in theirs)
        probe = {"tokens": tokens_of(1, seed)}, np.ones(B, np.int32), "rows", False
        assert one.run(*probe).rows().tobytes() == other.run(*probe).rows().tobytes()
    assert spilled > 2


@pytest.mark.parametrize("counts", [None, [4, 2, 1]], ids=["whole", "part"])
def test_a_commit_moves_spilled_rows_while_it_holds_the_lock(opened, counts, monkeypatch):
    model, free = opened("ring"), list[bool]()
    loop, spill = model.open_loop(), model.open_loop()._spill
    with ThreadPoolExecutor(1) as other:

        def spied(row: int, count: int) -> None:
            free.append(other.submit(model.backend.lock.acquire, blocking=False).result())
            if free[-1]:
                other.submit(model.backend.lock.release).result()
            spill(row, count)

        monkeypatch.setattr(loop, "_spill", spied)
        for seed in range(12):
            loop.run({"tokens": tokens_of(4, seed)}, np.full(B, 4, np.int32), commit=False)
            loop.commit(None if counts is None else np.array(counts, np.int32))
    assert free
    assert not any(free)


def test_a_part_of_rolled_memory_is_refused(opened):
    loop = opened("rolled").open_loop()
    loop.run({"tokens": tokens_of(4)}, np.array([4, 3, 0], np.int32), commit=False)
    with pytest.raises(UsageError, match=r'rolled, .* expected a ring; load with update="ring"'):
        loop.commit(np.array([1, 3, 0], np.int32))
    assert loop.fill.tolist() == [0, 0, 0]
    loop.commit()
    assert loop.fill.tolist() == [4, 3, 0]


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
