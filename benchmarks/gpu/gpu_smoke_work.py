"""Check work on the device: its order, recorded graphs, threads, contexts and forks."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

import numpy as np
from gpu_smoke_memory import Checks, Figures, require, seconds_of
from txl_runtime.device.interface import host_address
from txl_runtime.errors import BackendError, CheckError

__all__ = ["WorkChecks"]

THREADS, TURNS = 4, 100


class WorkChecks(Checks):
    """The checks of work; `named` returns all by name but `forked`, which only systems with fork can run."""

    def named(self) -> dict[str, Callable[[], Figures]]:
        """Return all checks but `forked` by name, in the order in which they run."""
        return {
            "events": self.events,
            "record and replay": self.replayed,
            "a record that fails": self.failed_records,
            "threads": self.threads,
            "the application's context": self.context,
            "host time of a step's calls": self.host_time,
        }

    def events(self) -> Figures:
        """Check that all work that was queued before an event is done after a wait for the event."""
        queue, size, event = self._device.queue(), self._piece, self._device.event()
        event.wait()  # this event was never recorded, so the wait has to end at once
        block, back = self._device.allocate(size), self._device.staging(size)
        for value in (1, 2, 3):  # the same event is recorded three times
            inputs = self._device.staging(size)
            inputs[...] = value
            queue.send(block.address, host_address(inputs), size)
            queue.fetch(host_address(back), block.address, size)
            queue.record(event)
            event.wait()
            require(bool((back == value).all()), "an event was over before the work that came before it")
        return None

    def replayed(self) -> Figures:
        """Check that making a record does no work, and that a replay reads the current page-locked memory."""
        queue, device, size = self._device.queue(), self._device, 4096
        inputs, back = device.staging(size), device.staging(size)
        first, second = device.allocate(size), device.allocate(size)

        def work() -> None:
            queue.send(first.address, host_address(inputs), size)
            queue.copy(second.address, first.address, 64, size // 64, 64, 64)
            queue.fetch(host_address(back), second.address, size)

        inputs[...] = 1
        replay = queue.capture(work)
        queue.wait()
        require(not back.any(), "a record did its work while it was made")
        for _ in range(20):
            inputs[...] = self._bytes(size)
            replay()
            queue.wait()
            require(np.array_equal(inputs, back), "a replay did not read what was there then")
        micro = 1e6 * seconds_of(queue, replay)
        return {"replay µs": micro}

    def failed_records(self) -> Figures:
        """Check that an error while a record is made is raised, and that the queue works and can record afterwards."""
        queue, size = self._device.queue(), 256
        block, inputs, back = self._device.allocate(size), self._device.staging(size), self._device.staging(size)

        def own() -> None:
            queue.zero(block.address, size)
            raise ZeroDivisionError("of the application")

        def stopped() -> None:
            queue.zero(block.address, size)
            raise KeyboardInterrupt

        def waits() -> None:
            queue.zero(block.address, size)
            queue.wait()

        text = ""
        for work, expected in ((own, ZeroDivisionError), (stopped, KeyboardInterrupt), (waits, BackendError)):
            try:
                queue.capture(work)
            except expected as error:
                text = str(error)
            else:
                raise CheckError(f"a record whose work raises {expected.__name__} was made")
            inputs[...] = self._bytes(size)
            back[...] = 0
            queue.send(block.address, host_address(inputs), size)
            queue.fetch(host_address(back), block.address, size)
            queue.wait()
            require(np.array_equal(inputs, back), f"after {expected.__name__} in a record the queue does not work")
        replay = queue.capture(lambda: queue.zero(block.address, size))
        replay()
        queue.wait()
        return {"said of a wait": text}

    def threads(self) -> Figures:
        """Check that several threads can use queues, copies and records at once, each with data of its own."""
        wrong: list[str] = []

        def run(number: int) -> None:
            try:
                draws, device = np.random.default_rng(number), self._device
                with device.current():
                    queue, size = device.queue(), 1 << 14
                    inputs, back, block = device.staging(size), device.staging(size), device.allocate(size)

                    def work() -> None:
                        queue.send(block.address, host_address(inputs), size)
                        queue.fetch(host_address(back), block.address, size)

                    for turn in range(TURNS):
                        inputs[...] = draws.integers(0, 256, size, np.uint8)
                        launch = queue.capture(work) if turn % 5 == 4 else work
                        launch()
                        queue.wait()  # the record may only be released when its work is done
                        if not np.array_equal(inputs, back):
                            wrong.append(f"thread {number}, turn {turn}: other bytes")
                        if turn % 7 == 0:
                            block = device.allocate(size)
            except Exception as error:  # the waiting thread reports it
                wrong.append(f"thread {number}: {error!r}")

        running = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        require(not wrong, "; ".join(wrong[:3]))
        return {"threads": THREADS, "turns": TURNS}

    def context(self) -> Figures:
        """Check that a thread has its previous context, or none, again after our work, even if the work failed."""
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

        run()  # in this thread the device's context is current already
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        require(len(seen) == 2, "a check of the context ended early")
        require(all(before == after for before, after in seen), f"another context is current afterwards: {seen}")
        require(seen[1][0] is None, "a new thread has a context already")
        return None

    def host_time(self) -> Figures:
        """Time a copy to the device, a copy back and an event, as calls and as a replayed record, in microseconds.

        This is the driver's share of a small model's step.
        """
        queue, device, event = self._device.queue(), self._device, self._device.event()
        inputs, back, block = device.staging(4096), device.staging(4096), device.allocate(4096)

        def work() -> None:
            queue.send(block.address, host_address(inputs), 4096)
            queue.fetch(host_address(back), block.address, 4096)

        replay, result = queue.capture(work), {}
        for name, step in (("calls", work), ("replay", replay)):
            times = []
            for _ in range(200):
                started = time.perf_counter()
                step()
                queue.record(event)
                event.wait()
                times.append(1e6 * (time.perf_counter() - started))
            result[f"{name} µs"] = float(np.median(times))
        return result

    def forked(self) -> Figures:
        """Check that a forked child gets an error that names the fork, and that the parent still works."""
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
            inputs = self._bytes(4096)
            require(np.array_equal(self._round_trip(self._device.queue(), inputs), inputs), "the parent is hurt")
        return None

    def _current(self) -> int | None:
        result = ctypes.c_void_p()
        self._driver.cuCtxGetCurrent(ctypes.byref(result))
        return result.value
