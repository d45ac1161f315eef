"""Tokens that are on the device already, as DLPack hands them over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from stand_ins.engine import DeviceArray
from txl_runtime import UsageError

B, V = 3, 60
both = pytest.mark.parametrize("update", ["ring", "rolled"])


def tokens_of(columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, (B, columns)).astype(np.int32)


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


@both
def test_owners_of_arrays_put_nothing_into_what_another_thread_records(opened, update):
    model = opened(update)
    one, other, there = model.stream(), model.stream(), DeviceArray(model.backend.device, tokens_of(2))
    taking: list[threading.Thread] = []
    for executable in model.backend.executables.values():
        _before_each_run(executable, lambda: _start(taking, lambda: other.loop.resident(there)))
    for seed in range(3):  # as it is, recorded, replayed
        one.step(tokens_of(4, seed))
    for thread in taking:
        thread.join(60)
    assert len(taking) == len(there.asked_for) > 1
    assert model.backend.driver.captured


def _before_each_run(executable: Any, hook: Callable[[], None]) -> None:
    """Have something done whenever an engine puts in its work."""
    prepare = executable.prepare

    def tied(*arguments: Any) -> Any:
        launch = prepare(*arguments)
        return lambda: (hook(), launch())

    executable.prepare = tied


def _start(started: list[threading.Thread], work: Callable[[], Any]) -> None:
    """Begin something in another thread, and leave it some time."""
    started.append(threading.Thread(target=work))
    started[-1].start()
    started[-1].join(0.05)


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
