"""The stand-in for CUDA's driver: late where a GPU is late, and every rule of it is held."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from txl_runtime.device.driver import Memcpy2D

from stand_ins.driver import FakeDriver
from stand_ins.driver_statuses import (
    ILLEGAL_ADDRESS,
    MemoryCopy,
)

SIZE = 64


class Hand:
    """The driver with a context, a stream, a block and a page-locked one: what C would do, in a line each."""

    def __init__(self, **options: Any) -> None:
        self.driver = FakeDriver(**options)
        assert self.driver.cuInit(0) == 0
        self.context = self.made("cuDevicePrimaryCtxRetain", 0)
        assert self.driver.cuCtxPushCurrent_v2(self.context) == 0
        self.stream = self.made("cuStreamCreate", 1)
        self.block, self.pinned = self.allocate(), self.made("cuMemHostAlloc", SIZE, 0)
        self.host = np.ctypeslib.as_array((ctypes.c_uint8 * SIZE).from_address(self.pinned))

    def made(self, name: str, *arguments: int) -> int:
        found = ctypes.c_void_p()
        assert getattr(self.driver, name)(ctypes.byref(found), *arguments) == 0
        assert found.value is not None
        return found.value

    def allocate(self, size: int = SIZE) -> int:
        found = ctypes.c_uint64()
        assert self.driver.cuMemAlloc_v2(ctypes.byref(found), size) == 0
        return found.value

    def send(self, source: int | None = None) -> int:
        return self.driver.cuMemcpyHtoDAsync_v2(self.block, source or self.pinned, SIZE, self.stream)

    def fetch(self, to: int | None = None) -> int:
        return self.driver.cuMemcpyDtoHAsync_v2(to or self.pinned, self.block, SIZE, self.stream)

    def wait(self) -> int:
        return self.driver.cuStreamSynchronize(self.stream)

    def there(self) -> bytes:
        """Return the block's content."""
        return self.driver.memory.view(self.block, SIZE).tobytes()

    def copy_rows(self, **changes: int) -> int:
        fields = {"to_type": 2, "to_device": self.block, "to_pitch": 16, "source_type": 1, "source_host": self.pinned}
        asked = MemoryCopy(**fields | {"source_pitch": 16, "width": 8, "height": 3} | changes)
        # The runtime's own structure has other names for its fields, and the same layout.
        return self.driver.cuMemcpy2DAsync_v2(ctypes.byref(Memcpy2D.from_buffer_copy(asked)), self.stream)

    def violations(self) -> str:
        found, self.driver.violations[:] = "; ".join(self.driver.violations), []
        return found

    def capture(self) -> None:
        assert self.driver.cuStreamBeginCapture_v2(self.stream, 2) == 0

    def end(self) -> tuple[int, int]:
        graph = ctypes.c_void_p()
        return self.driver.cuStreamEndCapture(self.stream, ctypes.byref(graph)), graph.value or 0


@pytest.fixture
def hand() -> Iterator[Hand]:
    made = Hand()
    yield made
    assert not made.driver.violations


def address_of(array: np.ndarray) -> int:
    return int(array.ctypes.data)


# --- when work is done --------------------------------------------------------------------------------------------


def test_page_locked_memory_is_read_when_its_turn_comes_and_other_memory_at_the_call(hand):
    hand.host[:] = 3
    hand.send()
    hand.host[:] = 4
    hand.wait()
    assert set(hand.there()) == {4}
    pageable = np.full(SIZE, 5, np.uint8)
    hand.send(address_of(pageable))
    pageable[:] = 6
    hand.wait()
    assert set(hand.there()) == {5}
    hand.fetch(address_of(pageable))
    assert set(pageable.tolist()) == {5}, "it came before the call returned"


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["device", "pinned"])
def test_memory_that_was_freed_is_poison(hand, kind):
    free, address = (
        (hand.driver.cuMemFree_v2, hand.block) if kind == "device" else (hand.driver.cuMemFreeHost, hand.pinned)
    )
    hand.send()
    assert free(address) == ILLEGAL_ADDRESS
    assert "that 1 tasks await" in hand.violations()
    assert hand.wait() == ILLEGAL_ADDRESS
    assert "ran on" in hand.violations()
    assert hand.send() == ILLEGAL_ADDRESS
    assert "that was freed" in hand.violations()
    assert free(address) == ILLEGAL_ADDRESS
    assert "twice" in hand.violations()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda h: h.driver.cuMemcpyHtoDAsync_v2(h.block + 1, h.pinned, SIZE, h.stream), "leave their device block"),
        (lambda h: h.driver.cuMemcpyHtoDAsync_v2(h.block - 9, h.pinned, 1, h.stream), "is in no device memory"),
        (lambda h: h.driver.cuMemcpyHtoDAsync_v2(h.block, h.pinned + 1, SIZE, h.stream), "leave their pinned block"),
        (lambda h: h.driver.cuMemcpyHtoDAsync_v2(h.block, h.block, 8, h.stream), "is in no pinned memory"),
        (lambda h: h.driver.cuMemcpyDtoDAsync_v2(h.block, h.block + 8, 16, h.stream), "a copy onto itself"),
        (lambda h: h.driver.cuMemFree_v2(h.block + 8), "where no device block starts"),
        (lambda h: h.driver.cuMemsetD8Async(h.block, 0, SIZE + 1, h.stream), "leave their device block"),
        (lambda h: h.driver.cuMemsetD2D8Async(h.block, 8, 0, 9, 2, h.stream), "rows of 9 bytes with a pitch of 8"),
        (lambda h: h.driver.cuMemsetD2D8Async(h.block, 8, 0, 8, 1, h.stream), "one row was set"),
        (lambda h: h.copy_rows(to_pitch=7), "do not fit a pitch of 7"),
        (lambda h: h.copy_rows(source_x=9), "do not fit a pitch of 16"),
        (lambda h: h.copy_rows(height=5), "leave their device block"),
        (lambda h: h.copy_rows(source_type=4), "of type 4"),
        (lambda h: h.driver.cuStreamSynchronize(h.block), "is no stream that lives"),
        (lambda h: h.driver.cuStreamCreate(ctypes.byref(ctypes.c_void_p()), 0), "waits for the default one"),
        (lambda h: h.driver.cuEventCreate(ctypes.byref(ctypes.c_void_p()), 0), "takes the time"),
    ],
)
def test_what_a_gpu_would_do_wrong_in_silence_is_kept(hand, call: Callable[[Hand], int], said):
    assert call(hand) == ILLEGAL_ADDRESS
    assert said in hand.violations()


def test_arguments_that_do_not_fit_are_found(hand):
    hand.driver.cuMemsetD8Async(hand.block, 256, 8, hand.stream)
    assert "does not fit a c_ubyte" in hand.violations()
    with pytest.raises(TypeError, match="takes a reference to c_ulong"):
        hand.driver.cuMemAlloc_v2(ctypes.byref(ctypes.c_int()), 8)


# --- what is told, and what is left -------------------------------------------------------------------------------


def test_an_engine_gets_aligned_memory_that_lives(hand):
    for place, said in (
        ((hand.block + 8, 8), "multiples of 256"),
        ((hand.block, SIZE + 1), "leave their device block"),
    ):
        hand.driver.launch(hand.stream, lambda _: [], [place])
        assert said in hand.violations()


def test_whatever_is_left_is_named():
    hand = Hand()
    with pytest.raises(AssertionError, match="a context was left current"):
        hand.driver.check()
    hand.driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    hand.driver.check()
    with pytest.raises(AssertionError, match="a device block of 64 bytes, a pinned block of 64 bytes, a stream"):
        hand.driver.check(everything=True)
    hand.driver.cuCtxPushCurrent_v2(hand.context)
    hand.capture()
    hand.driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    with pytest.raises(AssertionError, match="a capture is open"):
        hand.driver.check()
