"""The current CUDA context of a thread, which belongs to the application before it belongs to this project.

Work goes to the primary context of a device, which all libraries of a process share. This project makes it current
while it works, and then restores the previous one.
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
    """The primary context of a device, retained as long as this object lives.

    Attributes:
        driver, device: CUDA's driver, and its number of the device.
    """

    def __init__(self, driver: Driver, ordinal: int) -> None:
        device, handle = ctypes.c_int(), ctypes.c_void_p()
        driver.cuDeviceGet(ctypes.byref(device), ordinal)
        self.driver, self.device = driver, device.value
        # Every step calls these, so they come without the wrapper that checks the status; callers check it here.
        self._current, self._push, self._pop = (driver.instant(name) for name in (GET, PUSH, POP))
        self._popped = ctypes.byref(ctypes.c_void_p())  # receives the popped context, which is not needed
        try:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(handle), device.value)
        finally:
            if handle.value:
                give_back = weakref.finalize(self, driver.quietly, "cuDevicePrimaryCtxRelease_v2", device.value)
                give_back.atexit = False  # at the end of the process other libraries may still use the context
        self._handle, self._pushed = handle.value, ctypes.c_void_p(handle.value)

    def enter(self, current: Current) -> None:
        """Make the context current in this thread; if it was not, `current.entered` says that `leave` has to follow.

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
                current.entered = 0  # set by a different thread: this thread has nothing to leave
            return
        thread = threading.get_ident()
        try:
            current.entered = thread  # Python handles no signal between this and the call
            if status := self._push(self._pushed):
                raise driver.failure(PUSH, status)
        except BaseException:
            self._take_back()
            current.entered = 0
            raise

    def leave(self, current: Current, failing: bool) -> None:
        """Restore the previous context; with `failing`, an exception is on its way, so a failure here is ignored."""
        try:
            current.entered = 0  # as above, no signal between this and the call
            if status := self._pop(self._popped):
                raise self.driver.failure(POP, status)
        except BaseException as error:
            self._take_back()
            if not failing or not isinstance(error, Exception):
                raise

    def _take_back(self) -> None:
        """Pop the context if an interrupted call left it pushed, which is so if it is current."""
        found = ctypes.c_void_p()
        self.driver.quietly("cuCtxGetCurrent", ctypes.byref(found))
        if found.value == self._handle:
            self.driver.quietly("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def quietly(self, name: str, handle: int) -> None:
        """Call a function on the device, ignoring failures; do nothing in a forked child."""
        with contextlib.suppress(Exception), Current(self), self.driver.beside_records():
            self.driver.quietly(name, handle)


class Current:
    """A `with` that makes a context current. One object serves one `with` at a time.

    Ctrl-C may arrive at the beginning of a `with`'s end, before the context is left. The object's next `with` in that
    thread corrects this: the context is still current, and is left at the end.

    Attributes:
        found: memory to which the driver writes the current context; threads must not share it.
        reference: pointer to `found`.
        entered: id of the thread in which the context has to be left; 0 for none.
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
    """Return a lock for putting work into a queue; its thread may take it again.

    It is Python's RLock and taken only by `with`, so that Ctrl-C cannot arrive between taking it and its release. In a
    forked child it is free, because its owner may not exist there; entering the device fails in that child.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _after_fork() -> None:
    for lock in _locks:
        lock._at_fork_reinit()  # as Python does with the locks of its own modules


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_after_fork)
