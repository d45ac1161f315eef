"""Where a loop's work ends in the queue. What that work reads or writes may change, or go, once it was waited for."""

from __future__ import annotations

import contextlib

from txl_runtime.device.context import Turn
from txl_runtime.device.cuda import Device, Queue


class Tail:
    """One loop's last place in the queue. All but `drain` is for the loop's thread.

    Attributes:
        turn: the lock of whoever puts work into the queue.
    """

    def __init__(self, device: Device, queue: Queue, turn: Turn) -> None:
        self._queue, self._event, self._current, self.turn = queue, device.event(), device.current(), turn
        self._open = self._marked = False

    def begin(self) -> None:
        """Work follows. Until `mark`, nobody knows where it ends: an exception or an interrupt may cut it short."""
        self._open = True

    def mark(self) -> None:
        """All of it is in the queue."""
        self._queue.record(self._event)
        self._marked, self._open = True, False

    def wait(self) -> None:
        """Return when all of it is done. An interrupt leaves it to be waited for again."""
        if self._open:
            with self.turn:
                self._queue.wait()
        elif self._marked:
            with self._current:
                self._event.wait()
        self._open = self._marked = False

    def drain(self) -> None:
        """Wait, from a finalizer: failures are told to nobody.

        The event is waited for and not the queue, which may be recording just now, in this very thread.
        """
        if self._open or self._marked:
            with contextlib.suppress(Exception):
                self.wait()
