"""The current CUDA context of a thread, which the application may have set before it calls this project.

Work goes to a device's primary context, which all libraries of a process share. This project makes that context current
while it works, and then restores the previous context.
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
    """The primary context of a device, retained while this object exists.

    Attributes:
        driver, device: CUDA's driver, and the driver's number of the device.
    """

    def __init__(self, driver: Driver, ordinal: int) -> None:
        device, handle = ctypes.c_int(), ctypes.c_void_p()
        driver.cuDeviceGet(ctypes.byref(device), ordinal)
        self.driver, self.device = driver, device.value
        # Every step calls these three functions, so they lack the wrapper that checks the status; the callers check it.
        self._current, self._push, self._pop = (driver.instant(name) for name in (GET, PUSH, POP))
        self._popped = ctypes.byref(ctypes.c_void_p())  # memory for the popped context, which nothing uses
        try:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(handle), device.value)
        finally:
            if handle.value:
                give_back = weakref.finalize(self, driver.quietly, "cuDevicePrimaryCtxRelease_v2", device.value)
                # do not release it at the end of the process, when other libraries may still use the context
                give_back.atexit = False
        self._handle, self._pushed = handle.value, ctypes.c_void_p(handle.value)

    def enter(self, current: Current) -> None:
        """Make the context current in this thread; if it was not current, set `current.entered`: `leave` must follow.

        Raises:
            BackendError: this process is a fork of the process that opened the driver, or CUDA refuses.
        """
        driver = self.driver
        if driver.forked:
            driver.refuse_forked()
        if status := self._current(current.reference):
            raise driver.failure(GET, status)
        if current.found.value == self._handle:
            if current.entered and current.entered != threading.get_ident():
                current.entered = 0  # a different thread has set it; this thread has nothing to leave
            return
        thread = threading.get_ident()
        try:
            current.entered = thread  # Python handles no signal between this line and the call
            if status := self._push(self._pushed):
                raise driver.failure(PUSH, status)
        except BaseException:
            self._take_back()
            current.entered = 0
            raise

    def leave(self, current: Current, failing: bool) -> None:
        """Restore the previous context. With `failing`, an exception is being raised: a failure here is
        then ignored.
        """
        try:
            current.entered = 0  # Python handles no signal between this line and the call
            if status := self._pop(self._popped):
                raise self.driver.failure(POP, status)
        except BaseException as error:
            self._take_back()
            if not failing or not isinstance(error, Exception):
                raise

    def _take_back(self) -> None:
        """Pop the context if an interrupted call left it pushed; it was left pushed if it is current now."""
        current = ctypes.c_void_p()
        self.driver.quietly("cuCtxGetCurrent", ctypes.byref(current))
        if current.value == self._handle:
            self.driver.quietly("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def quietly(self, name: str, handle: int) -> None:
        """Call one of the driver's functions on the device, ignoring failures; do nothing in a forked child."""
        with contextlib.suppress(Exception), Current(self), self.driver.beside_records():
            self.driver.quietly(name, handle)


class Current:
    """A context manager that makes a CUDA context current. One object serves one `with` block at a time.

    Ctrl-C may arrive when a `with` block begins to end, before the context is left. The object's next `with` block in
    that thread repairs this: it finds the context still current, and leaves it at the end.

    Attributes:
        found: memory to which the driver writes the current context; threads must not share it.
        reference: pointer to `found`.
        entered: id of the thread in which the context must be left; 0 if it need not be left.
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
"""The type of a lock that is used only by `with`."""
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def open_lock() -> Lock:
    """Return a lock for putting work into a queue; a thread that holds it may take it again.

    The lock is Python's RLock, taken only by `with`, so that Ctrl-C cannot prevent its release. In a forked child it is
    free, because the thread that held it may not exist there; entering the device fails in that child anyway.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _after_fork() -> None:
    for lock in _locks:
        lock._at_fork_reinit()  # Python does the same with the locks of its own modules


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)
