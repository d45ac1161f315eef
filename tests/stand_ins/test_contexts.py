"""The stand-in for execution contexts refuses what a device would: each of its rules, broken once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import small_graphs
from txl_runtime.errors import BackendError

from stand_ins.cuda import run_graphs
from stand_ins.driver import FakeDriver
from stand_ins.engine import open_fake_device
from stand_ins.jetpack import EngineRun
from stand_ins.tensorrt import fake

TENSORRT, RTX = "trt114a", "rtx171"


class Hand:
    """An engine of one matrix product, set up by hand as the runtime does it.

    Attributes:
        errors: what the library logged.
    """

    def __init__(self, version: str, given_memory: bool = True, **options: Any) -> None:
        self.driver, self.errors = FakeDriver(), list[str]()
        trt = self.trt = fake(version, SimpleNamespace(data=b""))
        model = small_graphs.product()
        run_graphs(trt, lambda data: (EngineRun(model), {}), self.driver, options.get("faults", ()), given_memory)
        self.device = open_fake_device(self.driver)
        self.current = self.device.current()
        self.current.__enter__()
        self.queue = self.device.queue()
        logger = SimpleNamespace(log=lambda severity, text: self.errors.append(text))
        self.engine = trt.Runtime(logger).deserialize_cuda_engine(b"any")
        self.blocks = [self.device.allocate(4096) for _ in range(4)]

    def context(self, strategy: str = "USER_MANAGED", graphs: str = "DISABLED") -> Any:
        """A context without addresses or memory; TensorRT's has no strategies."""
        if self.trt.__name__ != "tensorrt_rtx":
            return self.engine.create_execution_context()
        config = self.engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(self.trt.ExecutionContextAllocationStrategy[strategy])
        config.cuda_graph_strategy = self.trt.CudaGraphStrategy[graphs]
        return self.engine.create_execution_context(config)

    def ready(self, **options: Any) -> Any:
        """A context that can run, and be recorded once it has run."""
        context = self.context(**options)
        for index, block in enumerate(self.blocks[:3]):
            assert context.set_tensor_address(self.engine.get_tensor_name(index), block.address)
        if self.trt.__name__ == "tensorrt_rtx":
            if options.get("strategy", "USER_MANAGED") == "USER_MANAGED":
                context.set_device_memory(self.blocks[3].address, self.blocks[3].size)
            context.is_stream_capturable(self.queue.handle)
        return context

    def run(self, context: Any) -> None:
        """One run, as the runtime asks for it."""
        if not context.execute_async_v3(self.queue.handle):
            raise BackendError(self.errors[-1])

    def ran(self, context: Any) -> Any:
        """The context after a run that is done."""
        self.run(context)
        self.queue.wait()
        return context


@pytest.fixture
def hand() -> Iterator[Callable[..., Hand]]:
    made: list[Hand] = []

    def make(*arguments: Any, **options: Any) -> Hand:
        made.append(Hand(*arguments, **options))
        return made[-1]

    yield make
    for item in made:
        item.driver.drain()
        assert not item.driver.violations
        item.current.__exit__(None)


def violations(hand: Hand) -> str:
    said = "; ".join(hand.driver.violations)
    hand.driver.violations.clear()
    return said


@pytest.mark.parametrize("version", [TENSORRT, RTX])
def test_a_context_that_has_run_is_recorded_and_computes_at_each_replay(hand, version):
    made = hand(version)
    context = made.ran(made.ready())
    replay = made.queue.capture(lambda: made.run(context))
    for value in (1, 2):
        for block in made.blocks[:3]:
            made.driver.memory.view(block.address, 64).view(np.float32)[...] = value
        replay()
        made.queue.wait()
        result = made.driver.memory.view(made.blocks[2].address, 16).view(np.float32)
        assert result.tolist() == [4.0 * value * value] * 4


# --- whose memory -------------------------------------------------------------------------------------------------


def test_an_engine_that_has_to_be_given_memory_makes_no_context_that_would_make_it(hand):
    made = hand(RTX)
    assert made.context("STATIC") is None
    assert "requires user allocation" in made.errors[-1]


@pytest.mark.parametrize("wrong", ["unaligned", "small", "freed", "the host's"])
def test_memory_that_does_not_serve_is_refused_without_a_word_but_in_the_log(hand, wrong):
    made = hand(RTX)
    context, block = made.ready(), made.device.allocate(8192)
    pinned = made.device.staging(8192)
    address = {"unaligned": block.address + 8, "the host's": pinned.ctypes.data}.get(wrong, block.address)
    size = 900 if wrong == "small" else 4096
    if wrong == "freed":
        del block
    context = made.context()
    assert context.set_device_memory(address, size) is None
    assert "setDeviceMemoryV2" in made.errors[-1]
    assert not context.execute_async_v3(made.queue.handle)
    assert "was not set" in made.errors[-1]


def test_a_context_that_makes_its_own_memory_takes_no_other(hand):
    made = hand(RTX, given_memory=False)
    made.ready(strategy="STATIC").set_device_memory(made.blocks[3].address, made.blocks[3].size)
    assert "setDeviceMemoryV2" in made.errors[-1]


def test_what_a_run_works_in_holds_garbage_afterwards_and_no_tensor(hand):
    made = hand(RTX)
    made.ran(made.ready())
    assert set(made.driver.memory.view(made.blocks[3].address, 256)) == {0xFF}
    context = made.ready()
    context.set_device_memory(made.blocks[0].address, made.blocks[0].size)
    context.execute_async_v3(made.queue.handle)
    assert "tensors in the memory that is worked in" in violations(made)


def test_a_context_s_memory_counts(hand):
    made = hand(TENSORRT)
    before = made.driver.memory.used()
    context = made.context()
    assert made.driver.memory.used() > before
    del context
    assert made.driver.memory.used() == before
    made.driver.capacity = before
    assert made.context() is None


# --- in which order -----------------------------------------------------------------------------------------------


def test_nothing_is_moved_under_a_context_that_has_run(hand):
    made = hand(RTX)
    context = made.ran(made.ready())
    context.set_tensor_address(made.engine.get_tensor_name(0), made.blocks[1].address)
    assert "was moved after the context had run" in violations(made)
    context.set_device_memory(made.blocks[3].address, made.blocks[3].size)
    assert "memory to work in was moved after" in violations(made)


# --- what a record bears ------------------------------------------------------------------------------------------


def never_ran(made: Hand) -> Any:
    return made.ready()


def not_done(made: Hand) -> Any:
    context = made.ready()
    made.run(context)
    return context


def records_itself(made: Hand) -> Any:
    return made.ran(made.ready(graphs="WHOLE_GRAPH_CAPTURE"))


def makes_memory(made: Hand) -> Any:
    return made.ran(made.ready(strategy="STATIC"))


def not_asked(made: Hand) -> Any:
    context = made.context()
    for index, block in enumerate(made.blocks[:3]):
        context.set_tensor_address(made.engine.get_tensor_name(index), block.address)
    context.set_device_memory(made.blocks[3].address, made.blocks[3].size)
    return made.ran(context)


@pytest.mark.parametrize(
    ("version", "prepare", "said"),
    [
        (TENSORRT, never_ran, "operation not permitted when stream is capturing"),
        (TENSORRT, not_done, "first run of the context is not done"),
        (RTX, never_ran, "operation not permitted when stream is capturing"),
        (RTX, not_done, "first run of the context is not done"),
        (RTX, records_itself, "cudaStreamBeginCapture"),
        (RTX, makes_memory, "not said to be capturable"),
        (RTX, not_asked, "not said to be capturable"),
    ],
)
def test_a_run_that_a_record_does_not_bear_fails_and_spoils_it(hand, version, prepare, said):
    made = hand(version, given_memory=prepare is not makes_memory)
    context = prepare(made)
    with pytest.raises(BackendError, match=said):
        made.queue.capture(lambda: made.run(context))
    with pytest.raises(BackendError, match=r"900|901"):  # whoever swallows that has no record either
        made.queue.capture(lambda: context.execute_async_v3(made.queue.handle) and None)
    made.queue.wait()


def test_nothing_is_set_up_by_a_thread_that_records(hand):
    made = hand(RTX)
    context = made.context()

    def work() -> None:
        made.context()
        context.set_tensor_address(made.engine.get_tensor_name(0), made.blocks[0].address)
        context.set_device_memory(made.blocks[3].address, made.blocks[3].size)
        context.is_stream_capturable(made.queue.handle)

    made.queue.capture(work)
    said = violations(made)
    for part in ("asked to make memory by a thread that records", "set while a stream records", "while one records"):
        assert part in said
