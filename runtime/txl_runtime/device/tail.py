"""Where a loop's work ends in the queue. What that work reads or writes may change, or go, once it was waited for."""

from __future__ import annotations

import contextlib

from txl_runtime.device.cuda import Device, Queue
from txl_runtime.device.cuda_context import Lock


class Tail:
    """One loop's last place in the queue; all but `drain` is for the loop's thread.

    Who has the lock puts work in by `with tail`, on the device. Whatever ends that, the event stands behind the work.

    Attributes:
        lock: of whoever puts work into the queue.
    """

    def __init__(self, device: Device, queue: Queue, lock: Lock) -> None:
        self._queue, self._event, self.lock = queue, device.event(), lock
        self._here, self._waiting, self._draining = device.current(), device.current(), device.current()
        self._marked = self._unmarked = False

    def __enter__(self) -> None:
        self._here.__enter__()
        self._unmarked = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._mark()
        except Exception:
            if kind is None:  # else the first failure comes out, and `wait` marks the place
                raise
        finally:
            self._here.__exit__(kind)

    def _mark(self) -> None:
        self._queue.record(self._event)
        self._marked, self._unmarked = True, False

    def wait(self) -> None:
        """Return when all of it is done. An interrupt leaves it to be waited for again."""
        if self._unmarked:  # the record failed, or an interrupt came before it
            with self.lock, self._waiting:
                self._mark()
        if self._marked:
            with self._waiting:
                self._event.wait()
            self._marked = False

    def drain(self) -> None:
        """Wait, from a finalizer: no lock is taken, and of failures nobody is told.

        The event is waited for and not the queue, which may be recording just now, in this very thread. That may be on
        the device, so what an interrupt left there is not made up for here.
        """
        if self._unmarked or self._marked:
            with contextlib.suppress(Exception), self._draining:
                if self._unmarked and not self._queue.recording():
                    self._mark()
                if self._marked:
                    self._event.wait()
