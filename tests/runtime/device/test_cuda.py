"""A device over the stand-in for its driver: contexts, copies, recorded work, several devices, what is given back."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from stand_ins.driver import FakeDriver
from txl_runtime.device import gpu
from txl_runtime.device.cuda import WIDEST, Block, Device
from txl_runtime.device.cuda_context import Current, open_lock
from txl_runtime.device.driver import Driver
from txl_runtime.device.interface import host_address
from txl_runtime.errors import BackendError

RNG = np.random.default_rng(0)


class Machine:
    """A device, and the stand-in behind it."""

    def __init__(self, **options: Any) -> None:
        self.fake = FakeDriver(**options)
        self.driver = Driver(self.fake)
        self.device = Device(self.driver)
        self.queue, self.lock = self.device.queue(), open_lock()

    def put(self, values: Any) -> Block:
        """A block with an array's bytes."""
        block, host = self.device.allocate(values.nbytes), np.ascontiguousarray(values)
        with self.device.current():
            self.queue.send(block.address, host_address(host), host.nbytes)
            self.queue.wait()
        return block

    def get(self, block: Block) -> Any:
        """A block's bytes."""
        host = np.zeros(block.size, np.uint8)
        with self.device.current():
            self.queue.fetch(host_address(host), block.address, block.size)
            self.queue.wait()
        return host

    def current(self) -> int | None:
        """The context of this thread, as the application sees it."""
        found = ctypes.c_void_p()
        assert self.fake.cuCtxGetCurrent(ctypes.byref(found)) == 0
        return found.value

    def push(self, device: int) -> int:
        """The application makes another device current."""
        other = self.fake.contexts[device]
        assert self.fake.cuCtxPushCurrent_v2(other) == 0
        return other

    def pop(self) -> None:
        assert self.fake.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())) == 0


@pytest.fixture
def machine() -> Machine:
    return Machine(seed=7)


# --- what is copied -----------------------------------------------------------------------------------------------


def test_memory_is_zeroed_and_comes_back_as_it_was_sent(machine):
    values = RNG.integers(0, 256, 1000, np.uint8)
    block = machine.device.allocate(1000)
    assert not machine.get(block).any()
    assert not machine.device.staging(1000).any()
    assert block.address % 256 == 0
    np.testing.assert_array_equal(machine.get(machine.put(values)), values)


@pytest.mark.parametrize(("width", "rows", "to_pitch", "from_pitch"), [(5, 7, 9, 11), (8, 3, 8, 20), (4, 1, 0, 0)])
def test_rows_are_copied_with_their_pitches_in_every_direction(machine, width, rows, to_pitch, from_pitch):
    source = RNG.integers(1, 256, 128, np.uint8)
    expected = np.zeros(128, np.uint8)
    for row in range(rows):
        expected[row * to_pitch :][:width] = source[row * from_pitch :][:width]
    sent, copied, fetched = machine.device.allocate(128), machine.device.allocate(128), np.zeros(128, np.uint8)
    block = machine.put(source)
    shape = (width, rows, to_pitch, from_pitch)
    with machine.device.current():
        machine.queue.send(sent.address, host_address(source), *shape)
        machine.queue.copy(copied.address, block.address, *shape)
        machine.queue.fetch(host_address(fetched), block.address, *shape)
        machine.queue.wait()
    for found in (machine.get(sent), machine.get(copied), fetched):
        np.testing.assert_array_equal(found, expected)


def test_nothing_is_asked_for_where_there_is_nothing_to_do(machine):
    before = sum(machine.fake.calls.values())
    for width, rows in ((0, 3), (3, 0), (-1, 1), (0, 1)):
        for copy in (machine.queue.send, machine.queue.fetch, machine.queue.copy):
            copy(256, 512, width, rows, 8, 8)
        machine.queue.zero(256, width, rows, 8)
    assert sum(machine.fake.calls.values()) == before


def test_rows_are_zeroed_alone_and_one_piece_by_the_function_for_any_size(machine):
    ones = np.ones(64, np.uint8)
    for width, rows, pitch, function in (
        (3, 4, 10, "cuMemsetD2D8Async"),
        (64, 1, 0, "cuMemsetD8Async"),
        (16, 4, 16, "cuMemsetD8Async"),
    ):
        block, before = machine.put(ones), machine.fake.calls[function]
        with machine.device.current():
            machine.queue.zero(block.address, width, rows, pitch)
            machine.queue.wait()
        assert machine.fake.calls[function] == before + 1
        expected = ones.copy()
        for row in range(rows):
            expected[row * pitch :][:width] = 0
        np.testing.assert_array_equal(machine.get(block), expected)


def test_what_is_too_large_for_functions_with_a_pitch_is_done_without():
    """Rows further apart than a pitch may be, and more than 2^31 bytes in one piece: as a pitch, a GPU refuses both."""
    asked: list[tuple[str, tuple[Any, ...]]] = []
    names = dict.fromkeys(("cuMemsetD8Async", "cuMemsetD2D8Async", "cuMemcpyDtoDAsync_v2", "cuMemcpy2DAsync_v2"))
    machine = Machine(eager=True)
    for name in names:
        setattr(machine.driver, name, lambda *arguments, name=name: asked.append((name, arguments)))
    queue, far = machine.device.queue(), WIDEST + 1
    queue.zero(256, 2**32)
    queue.zero(256, 2**31, 2, 2**31)
    queue.zero(256, 8, 2, far)
    queue.copy(0, 512, 8, 2, far, 16)
    end = queue.handle
    assert asked == [
        ("cuMemsetD8Async", (256, 0, 2**32, end)),
        ("cuMemsetD8Async", (256, 0, 2**32, end)),
        ("cuMemsetD8Async", (256, 0, 8, end)),
        ("cuMemsetD8Async", (256 + far, 0, 8, end)),
        ("cuMemcpyDtoDAsync_v2", (0, 512, 8, end)),
        ("cuMemcpyDtoDAsync_v2", (far, 528, 8, end)),
    ]


def test_an_event_is_set_again_and_again_and_waits_for_the_work_before_it(machine):
    event, staged = machine.device.event(), machine.device.staging(8)
    block = machine.device.allocate(8)
    with machine.device.current():
        event.wait()  # which was not recorded yet
        for value in range(1, 5):
            staged[:] = value
            machine.queue.send(block.address, host_address(staged), 8)
            machine.queue.fetch(host_address(staged), block.address, 8)
            machine.queue.record(event)
            event.wait()
            assert (staged == value).all()
    assert machine.fake.calls["cuEventCreate"] == 1


# --- contexts -----------------------------------------------------------------------------------------------------


def entries(machine: Machine) -> dict[str, Callable[[], object]]:
    """Everything that enters the device by itself, and what enters it for others."""

    def current() -> None:
        with machine.device.current(), machine.device.current():
            machine.queue.wait()

    device = machine.device
    return {
        "current": current,
        "allocate": lambda: device.allocate(100),
        "staging": lambda: device.staging(100),
        "queue": device.queue,
        "event": device.event,
        "open": lambda: Device(machine.driver),
        "settle": machine.queue.settle,
    }


NAMES = ("current", "allocate", "staging", "queue", "event", "open", "settle")


@pytest.mark.parametrize("before", [None, 0])
def test_the_applications_context_is_as_it_was(before):
    machine = Machine(seed=3, devices=2)
    others = None if before is None else machine.push(before)
    for enter in entries(machine).values():
        enter()
        assert machine.current() == others
    if before is not None:
        machine.pop()


@pytest.mark.parametrize(("outcome", "done"), [(2, False), (KeyboardInterrupt, False), (KeyboardInterrupt, True)])
@pytest.mark.parametrize("name", NAMES)
def test_whatever_fails_at_every_call_leaves_context_and_memory_as_they_were(name, outcome, done):
    """The n-th call of the driver fails, for every n: as a status, or as an interrupt before or after it was done."""
    machine = Machine(seed=1, devices=2)
    others = machine.push(1)
    before = sum(machine.fake.calls.values())
    kept = entries(machine)[name]()
    count = sum(machine.fake.calls.values()) - before
    assert count > 2
    del kept
    held = sorted(machine.fake.held())
    for n in range(count):
        machine.fake.tell("cu", outcome, after=n, done=done)
        kept = []
        with contextlib.suppress(BackendError, KeyboardInterrupt):
            kept.append(entries(machine)[name]())
        machine.fake.forgive()
        kept.clear()
        assert machine.current() == others, f"call {n}"
        assert sorted(machine.fake.held()) == held, f"call {n}"
    machine.pop()


def test_contexts_are_a_matter_of_each_thread():
    machine = Machine(seed=5, devices=2)
    found: dict[str, int | None] = {}
    go = threading.Event()

    def other() -> None:
        machine.push(1)
        found["before"] = machine.current()
        with machine.device.current():
            found["inside"] = machine.current()
            go.wait(5)
        found["after"] = machine.current()
        machine.pop()

    thread = threading.Thread(target=other)
    thread.start()
    with machine.device.current():
        assert machine.current() == machine.fake.contexts[0]
    assert machine.current() is None
    go.set()
    thread.join()
    first, second = machine.fake.contexts
    assert found == {"before": second, "inside": first, "after": second}


def test_an_exception_inside_comes_out_as_it_is_even_where_leaving_fails(machine):
    for error in (ValueError("inside"), KeyboardInterrupt()):
        for _ in range(2):
            machine.fake.tell("cuCtxPopCurrent", 700)
            with pytest.raises(type(error)), machine.device.current():
                raise error
            assert machine.current() is None
    machine.fake.tell("cuCtxPopCurrent", 201)
    with (
        pytest.raises(BackendError, match="cuCtxPopCurrent_v2 returned CUDA_ERROR_INVALID_CONTEXT"),
        machine.device.current(),
    ):
        pass
    assert machine.current() is None


def interrupted_where_it_is_left(with_it: Callable[[], None]) -> None:
    """An interrupt comes where the function begins that a `with` calls at its end."""

    def trace(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is Current.__exit__.__code__:
            raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            with_it()
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("others", [False, True])
def test_what_an_interrupt_did_not_leave_is_left_by_the_next(others):
    machine = Machine(devices=2)
    before = machine.push(1) if others else None
    device = machine.fake.contexts[0]
    here = machine.device.current()

    def enter() -> None:
        with here:
            assert machine.current() == device

    for _ in range(3):
        interrupted_where_it_is_left(enter)
        assert machine.current() == device  # nothing could leave it
        enter()
        assert machine.current() == before
    if others:
        machine.pop()


def test_what_an_interrupt_did_not_leave_in_one_thread_is_nothing_to_another():
    machine = Machine(devices=2)
    here, device = machine.device.current(), machine.fake.contexts[0]
    found: list[int | None] = []

    def enter() -> None:
        with here:
            found.append(machine.current())

    def other() -> None:
        machine.push(0)  # the application's own, in that thread
        enter()
        found.append(machine.current())
        machine.pop()

    interrupted_where_it_is_left(enter)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [device] * 3
    machine.pop()  # whoever changes threads has to put it right


def test_nothing_is_pushed_where_the_device_is_current_already(machine):
    machine.push(0)
    before = machine.fake.calls["cuCtxPushCurrent_v2"]
    with machine.device.current(), machine.device.current():
        machine.queue.wait()
    assert machine.fake.calls["cuCtxPushCurrent_v2"] == before
    machine.pop()


def test_what_was_left_is_not_left_again_where_the_application_has_the_device(machine):
    here = machine.device.current()
    with here:
        pass
    machine.push(0)
    with here:
        pass
    assert machine.current() == machine.fake.contexts[0]
    machine.pop()


def test_a_library_that_makes_another_device_current_inside_is_put_right(machine):
    machine = Machine(seed=1, devices=2)
    others = machine.push(1)
    with machine.device.current():  # cudaSetDevice replaces what is current
        machine.pop()
        machine.push(1)
    assert machine.current() == others
    machine.pop()
    assert machine.current() is None


# --- boards and cards ---------------------------------------------------------------------------------------------


def test_a_gpu_is_told_from_others_of_its_name_by_its_multiprocessors(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(gpu, "open_driver", lambda: machine.driver)
    monkeypatch.setattr(gpu, "gpu_name", gpu.gpu_name.__wrapped__)
    assert gpu.gpu_model() == "Fake RTX, SM 86, 16 multiprocessors"
    machine.fake.attributes[gpu.MULTIPROCESSORS] = 8
    assert gpu.gpu_model() == "Fake RTX, SM 86, 8 multiprocessors"
    machine.fake.devices = 0
    assert gpu.gpu_model() is None


@pytest.mark.parametrize("integrated", [False, True])
def test_who_waits_for_an_event_keeps_a_core_busy_on_a_card_and_sleeps_on_a_board(integrated):
    """The stand-in takes no other events."""
    machine = Machine(seed=3, integrated=integrated)
    event = machine.device.event()
    with machine.device.current():
        machine.queue.record(event)
        event.wait()
    machine.fake.check()


# --- several devices ----------------------------------------------------------------------------------------------


def test_the_first_of_several_devices_is_taken_and_said():
    machine = Machine(devices=3)
    assert machine.device.title == "Fake RTX, SM 86 (GPU 0 of the 3 that are visible)"
    assert Machine().device.title == "Fake RTX, SM 86"
    assert machine.device.ordinal == 0
    assert Device(machine.driver, 2).ordinal == 2


def test_two_devices_work_side_by_side():
    machine = Machine(seed=2, devices=2)
    second = Device(machine.driver, 1)
    with machine.device.current():
        first = machine.current()
        with second.current():
            assert machine.current() == machine.fake.contexts[1] != first
            second.allocate(8)
            with machine.device.current():
                assert machine.current() == first
        assert machine.current() == first
    assert machine.current() is None
    assert machine.fake.retained == {0: 1, 1: 1}


@pytest.mark.parametrize("ordinal", [1, 5])
def test_a_device_that_is_not_there_is_refused(ordinal):
    with pytest.raises(BackendError, match=rf"^CUDA sees 1 devices, expected GPU {ordinal}; look at CUDA_VISIBLE_DEV"):
        Device(Driver(FakeDriver()), ordinal)
    with pytest.raises(BackendError, match=r"^cuInit returned CUDA_ERROR_NO_DEVICE \(100.*no GPU is visible"):
        Driver(FakeDriver(devices=0))


# --- recorded work ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("outcome", "done"), [(901, False), (KeyboardInterrupt, False), (KeyboardInterrupt, True)])
@pytest.mark.parametrize(
    "name", ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags", "cuMemsetD8Async"]
)
def test_a_record_ends_whichever_call_fails(name, outcome, done):
    machine = Machine(seed=1)
    block = machine.device.allocate(8)
    machine.fake.tell(name, outcome, done=done)
    expected, said = (BackendError, f"^{name} returned ") if outcome == 901 else (KeyboardInterrupt, None)
    with machine.device.current(), pytest.raises(expected, match=said):
        machine.queue.capture(lambda: machine.queue.zero(block.address, 8))
    machine.fake.check()
    assert not [held for held in machine.fake.held() if "graph" in held]
    with machine.device.current():
        replay = machine.queue.capture(lambda: machine.queue.zero(block.address, 8))
        replay()
        machine.queue.wait()


def test_what_cannot_be_recorded_is_an_error_and_the_queue_works_on(machine):
    event = machine.device.event()

    def waiting() -> None:
        machine.queue.record(event)
        event.wait()

    with machine.device.current():
        for work in (machine.queue.wait, waiting):
            with pytest.raises(BackendError, match=r"return.*recorded"):
                machine.queue.capture(work)
        machine.queue.wait()


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_memory_is_made_and_given_back_whatever_somebody_else_records(machine, mode):
    """PyTorch's graphs refuse, while they are recorded, what any thread allocates, and are spoilt by it."""
    theirs, kept = machine.device.queue(), [machine.device.allocate(8), machine.device.staging(8)]
    with machine.device.current():
        machine.driver.cuStreamBeginCapture_v2(theirs.handle, mode)

    def ours() -> None:
        kept.clear()
        kept.extend((machine.device.allocate(8), machine.device.staging(8), machine.device.queue()))
        machine.fake.check_relaxed = machine.fake.relaxed

    thread = threading.Thread(target=ours)
    thread.start()
    thread.join()
    graph = ctypes.c_void_p()
    with machine.device.current():
        machine.driver.cuStreamEndCapture(theirs.handle, ctypes.byref(graph))
        machine.driver.cuGraphDestroy(graph.value)
    assert len(kept) == 3
    assert not machine.fake.failures
    assert not machine.fake.check_relaxed


def test_a_replay_keeps_what_it_needs(machine):
    """The queue, and whatever the work refers to: an engine's own memory."""
    block, queues = machine.device.allocate(8), [machine.device.queue()]

    def work(block: Block = block) -> None:
        queues[0].zero(block.address, 8)

    with machine.device.current():
        replay = queues[0].capture(work)
    queues.clear()
    del block, work
    with machine.device.current():
        replay()
    machine.fake.drain()


# --- what is given back -------------------------------------------------------------------------------------------


def test_everything_is_given_back_in_whichever_order_it_goes():
    machine = Machine(seed=1)
    kept = [machine.device.allocate(8), machine.device.staging(8), machine.device.event(), machine.device.queue()]
    fake = machine.fake
    del machine
    assert fake.retained == {0: 1}, "what is left needs the context"
    kept.clear()
    fake.check(everything=True)
    assert fake.retained == {0: 0}


def test_finalizers_enter_the_device_in_a_thread_that_never_saw_it():
    machine = Machine(seed=1, devices=2)
    kept = [machine.device.allocate(8), machine.device.staging(8), machine.device.event()]

    def other() -> None:
        machine.push(1)
        kept.clear()
        machine.pop()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert not machine.fake.failures
    assert machine.fake.memory.used() == 0


def test_finalizers_are_silent_where_the_driver_is_gone(machine, capfd):
    kept = [machine.device.allocate(8), machine.device.staging(8), machine.device.event(), machine.device.queue()]
    machine.fake.tell("cu", 4, times=10**6)
    machine.queue.settle()
    kept.clear()
    machine.fake.forgive()
    assert machine.fake.failures
    assert capfd.readouterr().err == ""


def test_an_array_keeps_its_page_locked_memory(machine):
    part = machine.device.staging(64)[10:20]
    part[:] = 1
    assert machine.fake.memory.used("pinned") == 64
    del part
    assert machine.fake.memory.used("pinned") == 0


def test_out_of_memory_says_so_and_what_is_freed_can_be_had_again():
    machine = Machine(capacity=1000)
    block = machine.device.allocate(900)
    for full in (lambda: machine.device.allocate(900), lambda: machine.device.staging(1001)):
        with pytest.raises(BackendError, match=r"Alloc.* returned CUDA_ERROR_OUT_OF_MEMORY .*memory is full: close"):
            full()
    del block
    machine.device.allocate(900)
