"""The end of a loop's work: also if it failed or was interrupted, and from a finalizer."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from stand_ins.driver import FakeDriver
from stand_ins.engine import open_fake_device
from txl_runtime.device.cuda_context import open_lock
from txl_runtime.device.interface import host_address
from txl_runtime.device.tail import Tail
from txl_runtime.errors import BackendError


class Work:
    """A loop's work on a device: a block is sent what is staged."""

    def __init__(self) -> None:
        self.fake = FakeDriver()
        self.device = open_fake_device(self.fake)
        self.queue, self.lock = self.device.queue(), open_lock()
        self.block, self.staged = self.device.allocate(64), self.device.staging(64)

    def tail(self) -> Tail:
        """A loop's."""
        return Tail(self.device, self.queue, self.lock)

    def send(self) -> None:
        """Put in a piece of work."""
        self.queue.send(self.block.address, host_address(self.staged), 64)

    def fail(self, tail: Tail, error: BaseException) -> None:
        """Put in a piece, and then fail."""

        def failing() -> None:
            with self.lock, tail:
                self.send()
                raise error

        with pytest.raises(type(error)) as caught:
            failing()
        assert caught.value is error


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.mark.parametrize("error", [BackendError("an engine"), KeyboardInterrupt()])
@pytest.mark.parametrize("wait", [Tail.wait, Tail.drain])
def test_work_that_was_cut_short_is_waited_for_at_its_event(work, error, wait):
    tail = work.tail()
    work.fail(tail, error)
    before = work.fake.calls["cuStreamSynchronize"]
    wait(tail)
    assert work.fake.log == ["zero", "copy"]
    assert work.fake.calls["cuStreamSynchronize"] == before


@pytest.mark.parametrize("wait", [Tail.wait, Tail.drain])
def test_a_place_that_could_not_be_marked_is_marked_where_it_is_waited_for(work, wait):
    tail = work.tail()
    work.fake.tell("cuEventRecord", 719)
    with pytest.raises(BackendError, match="cuEventRecord"), work.lock, tail:
        work.send()
    work.fake.tell("cuEventRecord", 719)
    work.fail(tail, ValueError("this comes out, and not that it cannot be marked"))
    wait(tail)
    assert work.fake.log == ["zero", "copy", "copy"]


def test_a_finalizer_while_something_is_recorded_spoils_nothing(work):
    """Whatever became of the work that it waits for, in the thread that records."""
    whole, failed, unmarked = work.tail(), work.tail(), work.tail()
    with work.lock, whole:
        work.send()
    work.fail(failed, BackendError("an engine"))
    work.fake.tell("cuEventRecord", 719)
    work.fail(unmarked, BackendError("an engine"))

    def recorded() -> None:
        work.send()
        for tail in (whole, failed, unmarked):
            tail.drain()
        work.send()

    with work.lock, work.device.current():
        replay = work.queue.capture(recorded)
        replay()
        work.queue.wait()
    assert work.fake.log == ["zero", *["copy"] * 3, *["copy (recorded)"] * 2]


def test_a_finalizer_takes_no_lock(work):
    tail, held, over = work.tail(), threading.Event(), threading.Event()
    work.fake.tell("cuEventRecord", 719)
    work.fail(tail, BackendError("an engine"))

    def other() -> None:
        with work.lock:
            held.set()
            over.wait(60)

    thread: Any = threading.Thread(target=other)
    thread.start()
    held.wait(60)
    tail.drain()
    assert work.fake.log == ["zero", "copy"]
    over.set()
    thread.join()
