"""Check memory of the host and of the device: copies, zeroing, allocation and release."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from txl_runtime.device.cuda import Device, Queue
from txl_runtime.device.driver import Driver
from txl_runtime.device.interface import host_address
from txl_runtime.errors import BackendError, CheckError

__all__ = ["Checks", "Figures", "MemoryChecks", "require", "seconds_of"]

Figures = Mapping[str, Any] | None
MORE = 2**45
"""A number of bytes that no machine has. In Windows and WSL2 the driver also hands out memory of the host for the GPU.
"""


def require(holds: bool, otherwise: str) -> None:
    """Raise CheckError with the message `otherwise` unless a condition is True."""
    if not holds:
        raise CheckError(otherwise)


def seconds_of(queue: Queue, work: Callable[[], None]) -> float:
    """Run some work five times on an empty queue; return the seconds of the fastest run, with the wait."""
    best = float("inf")
    for _ in range(5):
        queue.wait()
        started = time.perf_counter()
        work()
        queue.wait()
        best = min(best, time.perf_counter() - started)
    return best


class Checks:
    """The base of the classes of checks: the device, and bytes to copy.

    Args:
        driver, device: the driver and the device to check.
        big: the size of the largest block in bytes, a number that should not fit into 31 bits.
        piece: the number of bytes that are copied to measure the speed of copies.
        seed: the seed of the random bytes that are copied.
    """

    def __init__(self, driver: Driver, device: Device, big: int, piece: int, seed: int = 0) -> None:
        self._driver, self._device, self._big, self._piece = driver, device, big, piece
        self._draws = np.random.default_rng(seed)

    def _bytes(self, size: int) -> NDArray[np.uint8]:
        return self._draws.integers(0, 256, size, np.uint8)

    def _round_trip(self, queue: Queue, inputs: NDArray[np.uint8]) -> NDArray[np.uint8]:
        block, back = self._device.allocate(len(inputs)), np.zeros_like(inputs)
        queue.send(block.address, host_address(inputs), len(inputs))
        queue.fetch(host_address(back), block.address, len(inputs))
        queue.wait()
        return back


class MemoryChecks(Checks):
    """The checks of memory; `named` returns all by name."""

    def named(self) -> dict[str, Callable[[], Figures]]:
        """Return all checks by name, in the order in which they run."""
        return {
            "device": self.device,
            "pinned memory": self.pinned,
            "pageable memory": self.pageable,
            "rows with pitches": self.rows,
            "rows within the device": self.rows_within,
            "rows set to zero": self.zeroed_rows,
            "more than 2 GiB set to zero": self.big_zero,
            "out of memory, and again": self.out_of_memory,
            "memory given back": self.given_back,
        }

    def device(self) -> Figures:
        """Return the device's name, CUDA's version, and the free and the whole memory in MB."""
        version, free, total = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_size_t()
        self._driver.cuDriverGetVersion(ctypes.byref(version))
        self._driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
        return {"is": self._device.title, "CUDA": cuda, "MB free": free.value >> 20, "of": total.value >> 20}

    def pinned(self) -> Figures:
        """Check that page-locked memory is zeros at first, and that all its bytes are copied in both directions."""
        size, queue, device = self._piece, self._device.queue(), self._device
        block, inputs, back = device.allocate(size), device.staging(size), device.staging(size)
        require(not inputs.any(), "page-locked memory is not zeroed")
        inputs[...] = self._bytes(size)
        sent = seconds_of(queue, lambda: queue.send(block.address, host_address(inputs), size))
        fetched = seconds_of(queue, lambda: queue.fetch(host_address(back), block.address, size))
        require(np.array_equal(inputs, back), "what came back is not what was sent")
        return {"to the device GB/s": size / sent / 1e9, "back GB/s": size / fetched / 1e9}

    def pageable(self) -> Figures:
        """Check copies of ordinary NumPy arrays of five lengths."""
        queue = self._device.queue()
        for size in (1, 3, 4096, 2**16 + 1, 2**20 + 7):
            inputs = self._bytes(size)
            require(np.array_equal(self._round_trip(queue, inputs), inputs), f"{size} bytes came back changed")
        return None

    def rows(self) -> Figures:
        """Check copies of rows to the device, within the device and back, with a different pitch on each side."""
        queue, device, checked = self._device.queue(), self._device, 0
        for count, width in ((1, 7), (2, 1), (5, 64), (33, 100), (1000, 4)):
            pitches = [width + extra for extra in (0, 3, 256, 60)]
            host, first, second, back = (count * pitch for pitch in pitches)
            inputs, returned = self._bytes(host), np.full(back, 7, np.uint8)
            blocks = device.allocate(first), device.allocate(second)
            queue.send(blocks[0].address, host_address(inputs), width, count, pitches[1], pitches[0])
            queue.copy(blocks[1].address, blocks[0].address, width, count, pitches[2], pitches[1])
            queue.fetch(host_address(returned), blocks[1].address, width, count, pitches[3], pitches[2])
            queue.wait()
            result, expected = returned.reshape(count, -1), inputs.reshape(count, -1)
            require(
                np.array_equal(result[:, :width], expected[:, :width]), f"{count} rows of {width} came back changed"
            )
            require(
                bool((result[:, width:] == 7).all()), f"{count} rows of {width}: what lies between them was written"
            )
            checked += count
        return {"rows": checked}

    def rows_within(self) -> Figures:
        """Check that a copy of rows within the device, as of sequences' memory, keeps the bytes between the rows."""
        queue, device, checked = self._device.queue(), self._device, 0
        for count, width, pitch, other in ((2, 1, 5, 3), (3, 512, 512, 1024), (8, 100, 356, 101), (65, 4, 260, 4)):
            inputs, back = self._bytes(count * pitch), np.zeros(count * other, np.uint8)
            sevens, source, to = np.full_like(back, 7), device.allocate(len(inputs)), device.allocate(len(back))
            queue.send(source.address, host_address(inputs), len(inputs))
            queue.send(to.address, host_address(sevens), len(back))
            queue.copy(to.address, source.address, width, count, other, pitch)
            queue.fetch(host_address(back), to.address, len(back))
            queue.wait()
            result, expected = back.reshape(count, -1), inputs.reshape(count, -1)
            require(np.array_equal(result[:, :width], expected[:, :width]), f"{count} rows of {width} were not copied")
            require(
                bool((result[:, width:] == 7).all()), f"{count} rows of {width}: what lies between them was written"
            )
            checked += count
        return {"rows": checked}

    def zeroed_rows(self) -> Figures:
        """Set rows of a block to zero, and check that the bytes between the rows stay."""
        queue, size = self._device.queue(), 4096
        for width, count, pitch in ((1, 1, 0), (16, 8, 512), (512, 8, 512), (100, 3, 101)):
            block, ones, back = self._device.allocate(size), np.full(size, 255, np.uint8), np.zeros(size, np.uint8)
            queue.send(block.address, host_address(ones), size)
            queue.zero(block.address, width, count, pitch)
            queue.fetch(host_address(back), block.address, size)
            queue.wait()
            for row in range(count):
                ones[row * pitch : row * pitch + width] = 0
            require(np.array_equal(back, ones), f"{count} rows of {width} bytes, {pitch} apart, were not set as asked")
        return None

    def big_zero(self) -> Figures:
        """Set a block of more than 2^31 bytes to zero, then two rows that are 2^31 bytes apart."""
        queue, size = self._device.queue(), self._big
        block, ones, back = self._device.allocate(size), np.full(64, 255, np.uint8), np.zeros(64, np.uint8)
        far = min(2**31, size - 64)
        places = (0, size // 2, far - 64, far, size - 64)

        def mark() -> None:
            for place in places:
                queue.send(block.address + place, host_address(ones), 64)
            queue.wait()

        def read(place: int) -> NDArray[np.uint8]:
            queue.fetch(host_address(back), block.address + place, 64)
            queue.wait()
            return back.copy()

        mark()
        seconds = seconds_of(queue, lambda: queue.zero(block.address, size))
        for place in places:
            require(not read(place).any(), f"byte {place} of {size} was not set to zero")
        mark()
        queue.zero(block.address, 64, 2, far)
        require(not read(0).any() and not read(far).any(), "rows far apart were not set to zero")
        require(bool((read(size // 2) == 255).all()), "what lies between rows far apart was set to zero")
        return {"bytes": size, "GB/s": size / seconds / 1e9}

    def out_of_memory(self) -> Figures:
        """Ask for more memory than exists; check the error's message, and that copies work afterwards."""
        text = ""
        for _ in range(3):
            try:
                self._device.allocate(MORE)
            except BackendError as error:
                text = str(error)
            require("memory is full" in text, f"asked for more than there is, expected to be told so: {text!r}")
            inputs = self._bytes(4096)
            require(np.array_equal(self._round_trip(self._device.queue(), inputs), inputs), "nothing works afterwards")
        return {"said": text}

    def given_back(self) -> Figures:
        """Check that a block's memory is free again when nothing refers to the block."""

        def free() -> int:
            result, total = ctypes.c_size_t(), ctypes.c_size_t()
            self._driver.cuMemGetInfo_v2(ctypes.byref(result), ctypes.byref(total))
            return result.value

        before, alive = free(), []
        for _ in range(50):
            block = self._device.allocate(self._piece)
            alive.append(weakref.ref(block))
        del block
        require(not any(there() for there in alive), "blocks that nobody holds are kept")
        lost = before - free()
        require(lost < self._piece, f"{lost} bytes were not given back by 50 blocks of {self._piece}")
        return {"bytes lost": lost}
