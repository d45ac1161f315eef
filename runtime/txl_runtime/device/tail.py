"""The end of a loop's work in the queue. After waiting for it, the memory of that work may change or be freed."""

from __future__ import annotations

import contextlib

from txl_runtime.device.cuda import Device, Queue
from txl_runtime.device.cuda_context import Lock


class Tail:
    """An event after a loop's latest work in the queue; only the loop's thread calls its methods, except `drain`.

    A thread that holds the lock puts work in inside `with tail`, on the device. However the block ends, the event is
    set after the work.

    Attributes:
        lock: the lock that a thread holds while it puts work into the queue.
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
            if kind is None:  # else the block's own error is raised, and `wait` sets the event
                raise
        finally:
            self._here.__exit__(kind)

    def _mark(self) -> None:
        self._queue.record(self._event)
        self._marked, self._unmarked = True, False

    def wait(self) -> None:
        """Return when all of the work is done. After an interrupt, call it again."""
        if self._unmarked:  # setting the event failed, or Ctrl-C came before it
            with self.lock, self._waiting:
                self._mark()
        if self._marked:
            with self._waiting:
                self._event.wait()
            self._marked = False

    def drain(self) -> None:
        """Wait, for a finalizer: take no lock and ignore failures.

        It waits for the event and not for the queue, which may be recording at this moment, even in this thread. This
        thread may also be inside the device's context, so a context that Ctrl-C left there is not corrected here.
        """
        if self._unmarked or self._marked:
            with contextlib.suppress(Exception), self._draining:
                if self._unmarked and not self._queue.recording():
                    self._mark()
                if self._marked:
                    self._event.wait()
