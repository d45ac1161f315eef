"""Whatever fails or is interrupted, at every call of the driver: a stream goes on as before a segment or as after it.

An operation on states may also leave the stream saying what to do; after that it goes on. And nothing is ever left
behind: no memory, no handle, no capture that is open, no context.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from random_operations import B, Case
from stand_ins.driver import FakeDriver
from stand_ins.driver_statuses import LAUNCH_FAILED, OUT_OF_MEMORY
from step_models import FEATURES
from txl_runtime import BackendError, Model, Stream, UsageError

ALLOCATIONS = ("cuMemAlloc", "cuMemHostAlloc")
WAITS = ("cuStreamSynchronize", "cuEventSynchronize")
MADE = ("cuStreamCreate", "cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate", "cuEventCreate")
CALLS = (
    *ALLOCATIONS,
    *WAITS,
    *MADE,
    "cuCtxGetCurrent",
    "cuCtxPush",
    "cuMemcpy",
    "cuMemset",
    "cuGraphLaunch",
    "cuEventRecord",
    "engine",
)
"""All but those that give something back, which nobody hears of, and those that leave a context."""
KINDS = [("plain", "ring"), ("plain", "rolled"), ("recurrent", "replace"), ("counting", "replace")]
kinds = pytest.mark.parametrize(("name", "update"), KINDS, ids=lambda value: value)


class Lost(BackendError):
    """The error of an engine that fell over."""


def segment(case: Case, seed: int, length: int, b: int = B) -> dict[str, Any]:
    """Inputs of one segment."""
    draws = np.random.default_rng(seed)
    if case.name == "recurrent":
        obs = draws.normal(size=(b, length, FEATURES)).astype(np.float32)
        return {"obs": obs, "starts": draws.random(b) < 0.3}
    return {"tokens": draws.integers(0, case.theirs.vocab_size or 1, (b, length)).astype(np.int32)}


def run(case: Case, stream: Stream, seed: int, length: int = 4) -> bytes:
    """One segment; what it says."""
    outputs = stream.run(segment(case, seed, length, stream.batch_size))
    return b"".join(array.tobytes() for array in outputs.values())


def holds(stream: Stream) -> bytes:
    """The state."""
    return b"".join(array.tobytes() for array in stream.state().values())


def say(case: Case, stream: Stream) -> bytes:
    """Return the state and two further segments, which show how a stream goes on."""
    return holds(stream) + run(case, stream, 90) + run(case, stream, 91, 1)


def settle(case: Case, stream: Stream) -> None:
    """Three segments: the program has run as it is, was recorded, and was replayed."""
    for seed in range(3):
        run(case, stream, seed)


Operation = Callable[[Case, Stream], object]


def generate(case: Case, stream: Stream) -> object:
    if case.name == "recurrent":
        return run(case, stream, 6)
    return list(stream.generate(segment(case, 6, 4)["tokens"], 1, temperature=0))


def restore(case: Case, stream: Stream) -> None:
    stream.restore(case.theirs.stream().snapshot())


def keep_part(case: Case, stream: Stream) -> None:
    """Keep a part of a segment; all of it of rolled memory, which refuses parts."""
    stream.loop.run(segment(case, 7, 4), np.full(B, 4, np.int32), commit=False)
    stream.commit(None if case.update == "rolled" else np.ones(B, np.int32))


OPERATIONS: dict[str, tuple[int, Operation]] = {
    "a first segment": (0, lambda case, stream: run(case, stream, 5)),
    "a second segment, which is recorded": (1, lambda case, stream: run(case, stream, 5)),
    "a third segment": (2, lambda case, stream: run(case, stream, 5)),
    "a replayed segment": (5, lambda case, stream: run(case, stream, 5)),
    "a segment of another program": (3, lambda case, stream: run(case, stream, 5, 1)),
    "a segment behind one that nobody read": (
        5,
        lambda case, stream: [
            stream.loop.run(segment(case, 7, 4), np.full(B, 4, np.int32), commit=False),
            run(case, stream, 5),
        ],
    ),
    "a part of a segment": (5, keep_part),
    "generate": (3, generate),
    "reset": (3, lambda case, stream: stream.reset([1])),
    "reset all": (3, lambda case, stream: stream.reset()),
    "select": (3, lambda case, stream: stream.select([2, 0, 1])),
    "take": (3, lambda case, stream: stream.take(1)),
    "snapshot": (3, lambda case, stream: stream.snapshot()),
    "restore": (3, restore),
    "put": (3, lambda case, stream: stream.put(1, case.theirs.stream().take(0))),
}


def try_everywhere(
    case: Case, operation: str, calls: tuple[str, ...], outcome: Any, done: bool | None, repeat: bool = False
) -> int:
    """Let each call in turn fail that an operation makes; how many there were.

    What a call was asked for is `done` all the same, or not; with None it is every other time.
    With `repeat`, an operation that failed is done again where it did not happen, and then has to have happened.
    """
    driver = FakeDriver()
    model = case.open(driver)
    steps, work = OPERATIONS[operation]

    def opened(model: Model = model) -> Stream:
        stream = model.stream()
        for seed in range(steps):
            run(case, stream, seed)
        return stream

    fresh, before = say(case, model.stream()), say(case, opened())
    stream = opened()
    start = holds(stream)
    work(case, stream)
    after, number = say(case, stream), 0
    while True:
        stream, raised = opened(), False
        told = driver.tell(calls, outcome, number, done=number % 2 > 0 if done is None else done)
        try:
            work(case, stream)
        except (KeyboardInterrupt, BackendError, RuntimeError, MemoryError):
            raised = True
        driver.forgive()
        if not told.reached:
            break
        number += 1
        try:
            if raised and repeat and holds(stream) == start:
                work(case, stream)
            found = say(case, stream)
        except UsageError:  # it was left half replaced, and says so
            assert not repeat, f"out of memory at call {number} was found in the middle of a change"
            stream.reset()
            assert say(case, stream) == fresh, f"not as new after a reset, failed at call {number}"
        else:
            possible = (before, after) if raised and not repeat else (after,)
            assert found in possible, f"neither before nor after, failed at call {number}"
        del stream
        driver.check()
    del stream, model, opened
    driver.check(everything=True)
    FakeDriver.made.remove(driver)
    return number


@kinds
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if "segment" in name or name == "select"])
def test_out_of_memory_can_be_tried_again_wherever_it_happened(cases, name, update, operation):
    number = try_everywhere(cases(name, update), operation, ALLOCATIONS, OUT_OF_MEMORY, False, repeat=True)
    if operation == "a first segment":
        assert number >= 3, "blocks for what goes in, what comes out, and where it arrives"


@kinds
def test_a_stream_can_be_opened_again_wherever_memory_ran_out(cases, name, update):
    case, number, reached = cases(name, update), 0, True
    expected = say(case, case.open(FakeDriver()).stream())
    while reached:
        driver = FakeDriver()
        model: Model = case.open(driver)
        told = driver.tell(ALLOCATIONS, OUT_OF_MEMORY, number)
        with contextlib.suppress(BackendError):
            model.stream()
        driver.forgive()
        reached = told.reached
        stream = model.stream()
        assert say(case, stream) == expected
        del stream, model
        driver.check(everything=True)
        number += 1
    assert number > 1


@kinds
@pytest.mark.parametrize("operation", ["a second segment, which is recorded", "a replayed segment"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_an_interrupt_while_waiting_leaves_a_stream_that_goes_on(cases, name, update, operation, done):
    assert try_everywhere(cases(name, update), operation, WAITS, KeyboardInterrupt, done)


@kinds
@pytest.mark.parametrize("outcome", [KeyboardInterrupt, RuntimeError, MemoryError, Lost])
def test_whatever_an_engine_raises_while_it_is_recorded_the_stream_goes_on(cases, name, update, outcome):
    case = cases(name, update)
    assert try_everywhere(case, "a second segment, which is recorded", ("engine",), outcome, False)


@kinds
@pytest.mark.parametrize("call", ["cuGraphLaunch", "cuEventRecord", "cuCtxPush"])
def test_a_step_that_fails_changes_nothing(cases, name, update, call):
    assert try_everywhere(cases(name, update), "a replayed segment", (call,), LAUNCH_FAILED, False)


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize(("name", "update"), KINDS[:3], ids=lambda value: value)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_interrupt_at_any_call_leaves_a_stream_that_goes_on(cases, name, update, operation):
    assert try_everywhere(cases(name, update), operation, CALLS, KeyboardInterrupt, None)


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize(("name", "update"), KINDS[::3], ids=lambda value: value)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_failure_at_any_call_leaves_a_stream_that_goes_on(cases, name, update, operation):
    assert try_everywhere(cases(name, update), operation, CALLS[:-1], LAUNCH_FAILED, False)
