"""Tokens that are on the device already, as DLPack hands them over."""

from __future__ import annotations

import ctypes
import datetime
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from opcodes import bits
from stand_ins.engine import DeviceArray, open_stand_in, recording_elsewhere
from txl_runtime import UsageError
from txl_runtime.device.cuda import Device
from txl_runtime.device.dlpack import _Tensor

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


@both
def test_a_copy_on_the_host_is_waited_for_beside_what_another_model_records(opened, update):
    model, host = opened(update), tokens_of(5)
    loop, other = model.stream().loop, open_stand_in(model.bundle, update, driver=model.backend.driver)
    there = loop.resident(DeviceArray(model.backend.device, host))
    with recording_elsewhere(model.backend.driver, other):
        assert np.array_equal(loop.fetch(there), host)


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


class Odd:
    """An array of the device whose owner misbehaves: what is found under a name is called, or given as it is."""

    def __init__(self, device: Device, **odd: Any) -> None:
        self._given = {"__dlpack_device__": lambda: device.dlpack, "__dlpack__": lambda stream: None, **odd}

    def __getattr__(self, name: str) -> Any:
        if name not in self._given:
            raise AttributeError(name)
        if isinstance(self._given[name], BaseException):
            raise self._given[name]
        return self._given[name]


def failing(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no\nsuch thing")


class Capsule:
    """A capsule whose description of an array was changed."""

    def __init__(self, **fields: Any) -> None:
        self.array = np.zeros((B, 2), np.int32)
        self.fields = fields

    def __call__(self, stream: int) -> Any:
        capsule = self.array.__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        tensor = _Tensor.from_address(get(capsule, b"dltensor"))
        for name, value in self.fields.items():
            setattr(tensor, name, value)
        return capsule


NEGATIVE = (ctypes.c_int64 * 2)(B, -2)
ODD: dict[str, dict[str, Any]] = {
    "no word where it lies": {"__dlpack_device__": RuntimeError("no name")},
    "a place that fails": {"__dlpack_device__": failing},
    "a place that is no pair": {"__dlpack_device__": lambda: 5},
    "a place of texts": {"__dlpack_device__": lambda: ("a", "b")},
    "a place of huge numbers": {"__dlpack_device__": lambda: (10**400, float("inf"))},
    "no capsule": {},
    "a capsule that fails": {"__dlpack__": failing},
    "no word of a capsule": {"__dlpack__": RuntimeError("no name")},
    "nothing to call": {"__dlpack__": 5},
    "another's arguments": {"__dlpack__": lambda: None},
    "another capsule": {"__dlpack__": lambda stream: datetime.datetime_CAPI},
    "no axes": {"__dlpack__": Capsule(ndim=0)},
    "fewer than no axes": {"__dlpack__": Capsule(ndim=-(2**31))},
    "no shape": {"__dlpack__": Capsule(shape=None)},
    "a negative shape": {"__dlpack__": Capsule(shape=NEGATIVE)},
}


@both
@pytest.mark.parametrize("odd", ODD)
def test_an_owner_that_misbehaves_is_refused_and_changes_nothing(opened, update, odd):
    model = opened(update)
    stream = model.stream()
    stream.feed(tokens_of(6))
    before = bits(stream)
    tokens = Odd(model.backend.device, **ODD[odd])
    for call in (stream.step, stream.feed, stream.score, lambda t: stream.generate(t, 1)):
        with pytest.raises(UsageError) as caught:
            call(tokens)
        assert str(caught.value).isprintable()
        assert bits(stream) == before
