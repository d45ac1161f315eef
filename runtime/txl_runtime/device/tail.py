"""The end of a loop's work in the queue; whoever waits for it may then change or free memory that the work uses."""

from __future__ import annotations

import contextlib

from txl_runtime.device.cuda import Device, Queue
from txl_runtime.device.cuda_context import Lock


class Tail:
    """An event behind a loop's latest work in the queue. Only the loop's thread calls its methods, except `drain`.

    A thread that holds the lock puts work into the queue inside a block `with tail`, which also enters the device. At
    the end of the block, even after an error, the event is set behind the work.

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
            if kind is None:  # otherwise the block's own error is raised, and `wait` sets the event
                raise
        finally:
            self._here.__exit__(kind)

    def _mark(self) -> None:
        self._queue.record(self._event)
        self._marked, self._unmarked = True, False

    def wait(self) -> None:
        """Wait until all of the loop's work is done. After an interrupt, call it again."""
        if self._unmarked:  # `_mark` failed, or Ctrl-C came before it
            with self.lock, self._waiting:
                self._mark()
        if self._marked:
            with self._waiting:
                self._event.wait()
            self._marked = False

    def drain(self) -> None:
        """Wait as `wait` does, but take no lock and ignore failures. Finalizers call this.

        The method waits for the event and not for the queue, because the queue may be recording, even in this thread.
        The thread may be inside the device's context, so this method does not restore a context that Ctrl-C left
        behind.
        """
        if self._unmarked or self._marked:
            with contextlib.suppress(Exception), self._draining:
                if self._unmarked and not self._queue.recording():
                    self._mark()
                if self._marked:
                    self._event.wait()
