"""Which device CUDA works on: a matter of each thread, and the application's before it is this project's.

Work goes to the primary context of a device, which all libraries of a process share. It is made current where something
of this project begins, and what was current before is current again where that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any

from txl_runtime.device.driver import Driver

GET, PUSH, POP = "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"


class Context:
    """The primary context of a device, retained for as long as anybody holds this.

    Attributes:
        driver, device: whose it is.
    """

    def __init__(self, driver: Driver, ordinal: int) -> None:
        device, handle = ctypes.c_int(), ctypes.c_void_p()
        driver.cuDeviceGet(ctypes.byref(device), ordinal)
        self.driver, self.device = driver, device.value
        # These stand in every step, so a status is looked at here.
        self._current, self._push, self._pop = (driver.instant(name) for name in (GET, PUSH, POP))
        self._popped = ctypes.byref(ctypes.c_void_p())  # nobody reads it
        try:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(handle), device.value)
        finally:
            if handle.value:
                give_back = weakref.finalize(self, driver.quietly, "cuDevicePrimaryCtxRelease_v2", device.value)
                give_back.atexit = False  # other libraries end what they have there; the process's end gives it back
        self._handle, self._pushed = handle.value, ctypes.c_void_p(handle.value)

    def enter(self, current: Current) -> None:
        """Make it current in this thread, and remember where it was not, so that `leave` has to follow.

        Raises:
            BackendError: this process is a fork of the one that opened the driver, or CUDA refuses.
        """
        driver = self.driver
        if driver.forked:
            driver.refuse_forked()
        if status := self._current(current.reference):
            raise driver.failure(GET, status)
        if current.found.value == self._handle:
            if current.entered and current.entered != threading.get_ident():
                current.entered = 0  # another thread's; what is current here is not this one's to leave
            return
        thread = threading.get_ident()
        try:
            current.entered = thread  # no interrupt comes between this and the call
            if status := self._push(self._pushed):
                raise driver.failure(PUSH, status)
        except BaseException:
            self._take_back()
            current.entered = 0
            raise

    def leave(self, current: Current, failing: bool) -> None:
        """Make current what was so before. Where something is `failing` already, CUDA's failure does not hide that."""
        try:
            current.entered = 0  # no interrupt comes between this and the call either
            if status := self._pop(self._popped):
                raise self.driver.failure(POP, status)
        except BaseException as error:
            self._take_back()
            if not failing or not isinstance(error, Exception):
                raise

    def _take_back(self) -> None:
        """Pop what an interrupted call left: interrupts come before or after a call, and it is current if pushed."""
        found = ctypes.c_void_p()
        self.driver.quietly("cuCtxGetCurrent", ctypes.byref(found))
        if found.value == self._handle:
            self.driver.quietly("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def quietly(self, name: str, handle: int) -> None:
        """Call a function on the device where nobody is left to hear of a failure; a forked child is left alone."""
        with contextlib.suppress(Exception), Current(self), self.driver.beside_records():
            self.driver.quietly(name, handle)


class Current:
    """Enters a context, and leaves it again. One object serves one `with` at a time.

    An interrupt can come where the end of a `with` begins, before anything could be left. The object's next `with` in
    that thread makes up for it: the context is current still, and is left at its end.

    Attributes:
        found: where the driver writes what is current; threads may not share it.
        reference: to it.
        entered: the thread in which the context has to be left; 0 for none.
    """

    __slots__ = ("_context", "entered", "found", "reference")

    def __init__(self, context: Context) -> None:
        self._context, self.entered, self.found = context, 0, ctypes.c_void_p()
        self.reference = ctypes.byref(self.found)

    def __enter__(self) -> None:
        self._context.enter(self)

    def __exit__(self, kind: object, *_: Any) -> None:
        if self.entered:
            self._context.leave(self, kind is not None)


Lock = AbstractContextManager[object]
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def open_lock() -> Lock:
    """The lock of those who put work into a queue. The thread that has it may take it again.

    It is the interpreter's own, and taken by `with` alone: no interrupt comes between taking it and what gives it back.
    In a forked child it is free, because the thread that had it may not exist there; the device refuses to be entered.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _after_fork() -> None:
    for lock in _locks:
        lock._at_fork_reinit()  # as the interpreter does with the locks of its own modules


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_after_fork)
