"""The project's own CUDA code on this machine's GPU, call by call: what a model's loop will ask of the driver.

    python benchmarks/gpu_smoke.py [--bytes N] [--out FOLDER]

Each check prints ok or FAILED with figures and the next one goes on; with --out they are in FOLDER/gpu_smoke.jsonl as
soon as they are known. Needs NumPy and the driver; PyTorch only for the checks that share memory with it. Where there
is no GPU it says so and ends with 0.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gpu_journal import Journal
from numpy.typing import NDArray
from txl_runtime.device.choosing import NO_GPU
from txl_runtime.device.cuda import Device, Queue, open_cuda
from txl_runtime.device.dlpack import device_tokens, fetch_tokens
from txl_runtime.device.driver import Driver, open_driver
from txl_runtime.device.gpu import gpu_name
from txl_runtime.device.interface import host_address
from txl_runtime.errors import BackendError, CheckError

BIG = 2**31 + 2**20
"""Bytes whose number does not fit 31 bits."""
PIECE = 2**26
"""Bytes that are copied to measure copies."""
THREADS, TURNS = 4, 100
Figures = Mapping[str, Any] | None


def require(holds: bool, otherwise: str) -> None:
    """Raise CheckError unless something holds."""
    if not holds:
        raise CheckError(otherwise)


class Smoke:
    """The checks, on a device that is open.

    Args:
        driver, device: what is checked.
        big, piece: bytes, see `BIG` and `PIECE`.
        seed: of the bytes that are copied.
    """

    def __init__(self, driver: Driver, device: Device, big: int = BIG, piece: int = PIECE, seed: int = 0) -> None:
        self._driver, self._device, self._big, self._piece = driver, device, big, piece
        self._draws = np.random.default_rng(seed)

    def run(self, journal: Journal) -> None:
        """All of them."""
        for name, check in {
            "device": self.device,
            "pinned memory": self.pinned,
            "pageable memory": self.pageable,
            "rows with pitches": self.rows,
            "rows set to zero": self.zeroed_rows,
            "more than 2 GiB set to zero": self.big_zero,
            "events": self.events,
            "record and replay": self.replayed,
            "a record that fails": self.failed_records,
            "out of memory, and again": self.out_of_memory,
            "memory given back": self.given_back,
            "threads": self.threads,
            "the application's context": self.context,
            "host time of a step's calls": self.host_time,
        }.items():
            journal.run(name, self._inside(check))
        if hasattr(os, "fork"):
            journal.run("a forked child is refused", self.forked)
        else:
            journal.skip("a forked child is refused", "this system has no fork")

    def _inside(self, check: Callable[[], Figures]) -> Callable[[], Figures]:
        """As a loop works: on the device, and left afterwards."""

        def run() -> Figures:
            with self._device.current():
                return check()

        return run

    def _bytes(self, size: int) -> NDArray[np.uint8]:
        return self._draws.integers(0, 256, size, np.uint8)

    def _round_trip(self, queue: Queue, given: NDArray[np.uint8]) -> NDArray[np.uint8]:
        block, back = self._device.allocate(len(given)), np.zeros_like(given)
        queue.send(block.address, host_address(given), len(given))
        queue.fetch(host_address(back), block.address, len(given))
        queue.wait()
        return back

    def device(self) -> Figures:
        """What it is."""
        version, free, total = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_size_t()
        self._driver.cuDriverGetVersion(ctypes.byref(version))
        self._driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
        return {"is": self._device.title, "CUDA": cuda, "MB free": free.value >> 20, "of": total.value >> 20}

    def pinned(self) -> Figures:
        """It is copied whole either way, and starts as zeros."""
        size, queue, device = self._piece, self._device.queue(), self._device
        block, given, back = device.allocate(size), device.staging(size), device.staging(size)
        require(not given.any(), "page-locked memory is not zeroed")
        given[...] = self._bytes(size)
        sent = _seconds(queue, lambda: queue.send(block.address, host_address(given), size))
        fetched = _seconds(queue, lambda: queue.fetch(host_address(back), block.address, size))
        require(np.array_equal(given, back), "what came back is not what was sent")
        return {"to the device GB/s": size / sent / 1e9, "back GB/s": size / fetched / 1e9}

    def pageable(self) -> Figures:
        """Any array of NumPy, of any length."""
        queue = self._device.queue()
        for size in (1, 3, 4096, 2**16 + 1, 2**20 + 7):
            given = self._bytes(size)
            require(np.array_equal(self._round_trip(queue, given), given), f"{size} bytes came back changed")
        return None

    def rows(self) -> Figures:
        """To the device, within it and back, with a pitch of its own on each side."""
        queue, device, checked = self._device.queue(), self._device, 0
        for count, width in ((1, 7), (2, 1), (5, 64), (33, 100), (1000, 4)):
            pitches = [width + extra for extra in (0, 3, 256, 60)]
            host, first, second, back = (count * pitch for pitch in pitches)
            given, returned = self._bytes(host), np.full(back, 7, np.uint8)
            blocks = device.allocate(first), device.allocate(second)
            queue.send(blocks[0].address, host_address(given), width, count, pitches[1], pitches[0])
            queue.copy(blocks[1].address, blocks[0].address, width, count, pitches[2], pitches[1])
            queue.fetch(host_address(returned), blocks[1].address, width, count, pitches[3], pitches[2])
            queue.wait()
            found, expected = returned.reshape(count, -1), given.reshape(count, -1)
            require(np.array_equal(found[:, :width], expected[:, :width]), f"{count} rows of {width} came back changed")
            require(bool((found[:, width:] == 7).all()), f"{count} rows of {width}: what lies between them was written")
            checked += count
        return {"rows": checked}

    def zeroed_rows(self) -> Figures:
        """What lies between the rows stays."""
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
        """One piece of more than 2^31 bytes, and rows further apart than a pitch can say."""
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
        seconds = _seconds(queue, lambda: queue.zero(block.address, size))
        for place in places:
            require(not read(place).any(), f"byte {place} of {size} was not set to zero")
        mark()
        queue.zero(block.address, 64, 2, far)
        require(not read(0).any() and not read(far).any(), "rows far apart were not set to zero")
        require(bool((read(size // 2) == 255).all()), "what lies between rows far apart was set to zero")
        return {"bytes": size, "GB/s": size / seconds / 1e9}

    def events(self) -> Figures:
        """An event is a place in the work: what was asked for before it is done when it was waited for."""
        queue, size, event = self._device.queue(), self._piece, self._device.event()
        event.wait()  # never recorded: at once
        block, back = self._device.allocate(size), self._device.staging(size)
        for value in (1, 2, 3):  # the same event again and again
            given = self._device.staging(size)
            given[...] = value
            queue.send(block.address, host_address(given), size)
            queue.fetch(host_address(back), block.address, size)
            queue.record(event)
            event.wait()
            require(bool((back == value).all()), "an event was over before the work that came before it")
        return None

    def replayed(self) -> Figures:
        """A record does nothing when it is made, and reads page-locked memory when it is replayed."""
        queue, device, size = self._device.queue(), self._device, 4096
        given, back = device.staging(size), device.staging(size)
        first, second = device.allocate(size), device.allocate(size)

        def work() -> None:
            queue.send(first.address, host_address(given), size)
            queue.copy(second.address, first.address, 64, size // 64, 64, 64)
            queue.fetch(host_address(back), second.address, size)

        given[...] = 1
        replay = queue.capture(work)
        queue.wait()
        require(not back.any(), "a record did its work while it was made")
        for _ in range(20):
            given[...] = self._bytes(size)
            replay()
            queue.wait()
            require(np.array_equal(given, back), "a replay did not read what was there then")
        micro = 1e6 * _seconds(queue, replay)
        return {"replay µs": micro}

    def failed_records(self) -> Figures:
        """Whatever goes wrong inside comes out, the queue records no longer, and records again."""
        queue, size = self._device.queue(), 256
        block, given, back = self._device.allocate(size), self._device.staging(size), self._device.staging(size)

        def own() -> None:
            queue.zero(block.address, size)
            raise ZeroDivisionError("of the application")

        def stopped() -> None:
            queue.zero(block.address, size)
            raise KeyboardInterrupt

        def waits() -> None:
            queue.zero(block.address, size)
            queue.wait()

        said = ""
        for work, expected in ((own, ZeroDivisionError), (stopped, KeyboardInterrupt), (waits, BackendError)):
            try:
                queue.capture(work)
            except expected as error:
                said = str(error)
            else:
                raise CheckError(f"a record whose work raises {expected.__name__} was made")
            given[...] = self._bytes(size)
            back[...] = 0
            queue.send(block.address, host_address(given), size)
            queue.fetch(host_address(back), block.address, size)
            queue.wait()
            require(np.array_equal(given, back), f"after {expected.__name__} in a record the queue does not work")
        replay = queue.capture(lambda: queue.zero(block.address, size))
        replay()
        queue.wait()
        return {"said of a wait": said}

    def out_of_memory(self) -> Figures:
        """More than there is: told in words, and the next request is served."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        said = ""
        for _ in range(3):
            try:
                self._device.allocate(total.value + 2**20)
            except BackendError as error:
                said = str(error)
            require("memory is full" in said, f"asked for more than there is, expected to be told so: {said!r}")
            given = self._bytes(4096)
            require(np.array_equal(self._round_trip(self._device.queue(), given), given), "nothing works afterwards")
        return {"said": said}

    def given_back(self) -> Figures:
        """What nobody holds any more is the device's again."""

        def free() -> int:
            found, total = ctypes.c_size_t(), ctypes.c_size_t()
            self._driver.cuMemGetInfo_v2(ctypes.byref(found), ctypes.byref(total))
            return found.value

        before, alive = free(), []
        for _ in range(50):
            block = self._device.allocate(self._piece)
            alive.append(weakref.ref(block))
        del block
        require(not any(there() for there in alive), "blocks that nobody holds are kept")
        lost = before - free()
        require(lost < self._piece, f"{lost} bytes were not given back by 50 blocks of {self._piece}")
        return {"bytes lost": lost}

    def threads(self) -> Figures:
        """Queues, copies and records of several threads at once, each with bytes of its own."""
        wrong: list[str] = []

        def run(number: int) -> None:
            try:
                draws, device = np.random.default_rng(number), self._device
                with device.current():
                    queue, size = device.queue(), 1 << 14
                    given, back, block = device.staging(size), device.staging(size), device.allocate(size)

                    def work() -> None:
                        queue.send(block.address, host_address(given), size)
                        queue.fetch(host_address(back), block.address, size)

                    for turn in range(TURNS):
                        given[...] = draws.integers(0, 256, size, np.uint8)
                        launch = queue.capture(work) if turn % 5 == 4 else work
                        launch()
                        queue.wait()  # a record is kept until its work is done
                        if not np.array_equal(given, back):
                            wrong.append(f"thread {number}, turn {turn}: other bytes")
                        if turn % 7 == 0:
                            block = device.allocate(size)
            except Exception as error:  # told to the thread that waits
                wrong.append(f"thread {number}: {error!r}")

        running = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        require(not wrong, "; ".join(wrong[:3]))
        return {"threads": THREADS, "turns": TURNS}

    def context(self) -> Figures:
        """What was current in a thread is so again, nothing too, whether or not something failed inside."""
        seen: list[tuple[int | None, int | None]] = []

        def run() -> None:
            before = self._current()
            self._device.allocate(16)
            with self._device.current():
                self._device.queue()
            try:
                with self._device.current():
                    raise ZeroDivisionError
            except ZeroDivisionError:
                seen.append((before, self._current()))

        run()  # within the device's context, which these checks are in
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        require(len(seen) == 2, "a check of the context ended early")
        require(all(before == after for before, after in seen), f"another context is current afterwards: {seen}")
        require(seen[1][0] is None, "a new thread has a context already")
        return None

    def host_time(self) -> Figures:
        """Send, launch of a record, fetch, event: the driver's share of a step of a small model."""
        queue, device, event = self._device.queue(), self._device, self._device.event()
        given, back, block = device.staging(4096), device.staging(4096), device.allocate(4096)

        def work() -> None:
            queue.send(block.address, host_address(given), 4096)
            queue.fetch(host_address(back), block.address, 4096)

        replay, found = queue.capture(work), {}
        for name, step in (("calls", work), ("replay", replay)):
            times = []
            for _ in range(200):
                started = time.perf_counter()
                step()
                queue.record(event)
                event.wait()
                times.append(1e6 * (time.perf_counter() - started))
            found[f"{name} µs"] = float(np.median(times))
        return found

    def forked(self) -> Figures:
        """A child is told by name, and what the parent has is left alone."""
        child = os.fork()
        if child == 0:
            code = 1
            try:
                self._device.allocate(16)
            except BackendError as error:
                code = 0 if "forked" in str(error) else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        require(code == 0, f"the child ended with {code}, expected it to be refused by name")
        with self._device.current():
            given = self._bytes(4096)
            require(np.array_equal(self._round_trip(self._device.queue(), given), given), "the parent is hurt")
        return None

    def _current(self) -> int | None:
        found = ctypes.c_void_p()
        self._driver.cuCtxGetCurrent(ctypes.byref(found))
        return found.value


def _seconds(queue: Queue, work: Callable[[], None]) -> float:
    """The best of some times of work in a queue that is empty before."""
    best = float("inf")
    for _ in range(5):
        queue.wait()
        started = time.perf_counter()
        work()
        queue.wait()
        best = min(best, time.perf_counter() - started)
    return best


def with_torch(device: Device, journal: Journal) -> None:
    """What is shared with PyTorch in one process: tokens by DLPack, the device that it works on."""
    names = ("tokens of PyTorch", "PyTorch's device")
    try:
        import torch
    except ImportError:
        reason = "PyTorch is not installed"
    else:
        reason = "" if torch.cuda.is_available() else "PyTorch was built without CUDA"
    if reason:
        for name in names:
            journal.skip(name, reason)
        return

    def tokens() -> Figures:
        for shape in ((1, 1), (4, 64), (32, 7)):
            made = torch.arange(shape[0] * shape[1], device="cuda").reshape(shape).int()
            for given in (made, made[:, : max(shape[1] // 2, 1)]):
                with device.current():
                    queue = device.queue()
                    found = device_tokens(given, device.dlpack, queue.handle)
                    require(found is not None, "tokens of PyTorch on this device are not seen there")
                    assert found is not None
                    require(np.array_equal(fetch_tokens(found, queue), given.cpu().numpy()), f"other tokens of {shape}")
        require(device_tokens(torch.zeros(1, 1), device.dlpack, 0) is None, "tokens on the host are taken for others")
        return None

    def current() -> Figures:
        last = torch.cuda.device_count() - 1
        torch.cuda.set_device(last)
        before = torch.ones(4, device="cuda")
        device.allocate(16)
        with device.current():
            device.queue().wait()
        require(torch.cuda.current_device() == last, "PyTorch works on another device afterwards")
        require((before + torch.ones(4, device="cuda")).device.index == last, "new tensors are on another device")
        return {"devices": last + 1}

    journal.run(names[0], tokens)
    journal.run(names[1], current)


def main() -> int:
    """Run it; 1 where a check failed."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    options.add_argument("--bytes", type=int, default=BIG, help=f"of the largest block (default {BIG})")
    options.add_argument("--out", type=Path, metavar="FOLDER", help="write the results here")
    given = options.parse_args()
    journal = Journal("gpu_smoke", given.out)
    if gpu_name() is None:
        journal.skip("everything", NO_GPU)
        return journal.finish()
    try:
        opened = journal.run("open", lambda: {"is": open_cuda().title})
        if opened.state == "ok":
            Smoke(open_driver(), open_cuda(), given.bytes).run(journal)
            with_torch(open_cuda(), journal)
    except KeyboardInterrupt:
        journal.finish()
        return 130
    return journal.finish()


if __name__ == "__main__":
    sys.exit(main())
