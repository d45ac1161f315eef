"""CUDA's driver, libcuda, called with ctypes. Every GPU's driver includes it, so no CUDA version must be installed.

`Driver` has the needed functions under CUDA's names; each function raises an error unless it succeeds. An engine's
library may use its own version of CUDA at the same time. ctypes lets other threads run during each call.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Callable, Iterator
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from functools import cache
from typing import TYPE_CHECKING, Any

from txl_runtime.errors import BackendError
from txl_runtime.system import CUDA_DRIVER

HOST, DEVICE = 1, 2
"""CUDA's numbers of CU_MEMORYTYPE_HOST and _DEVICE."""
NON_BLOCKING, RELAXED = 1, 2
"""CUDA's numbers of CU_STREAM_NON_BLOCKING and CU_STREAM_CAPTURE_MODE_RELAXED."""
EVENTS = (2, 3)
"""CU_EVENT_DISABLE_TIMING, and the same together with CU_EVENT_BLOCKING_SYNC, which makes a wait sleep."""


class Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the functions that end in _v2: a copy of rows; its memory types say which side is the host."""

    _fields_ = (
        ("srcXInBytes", c_size_t),
        ("srcY", c_size_t),
        ("srcMemoryType", c_int),
        ("srcHost", c_void_p),
        ("srcDevice", c_uint64),
        ("srcArray", c_void_p),
        ("srcPitch", c_size_t),
        ("dstXInBytes", c_size_t),
        ("dstY", c_size_t),
        ("dstMemoryType", c_int),
        ("dstHost", c_void_p),
        ("dstDevice", c_uint64),
        ("dstArray", c_void_p),
        ("dstPitch", c_size_t),
        ("WidthInBytes", c_size_t),
        ("Height", c_size_t),
    )


_ADDRESS, _HANDLE, _HANDLES = c_uint64, c_void_p, POINTER(c_void_p)
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (POINTER(c_char), c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (_HANDLES, c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxGetCurrent": (_HANDLES,),
    "cuCtxPushCurrent_v2": (_HANDLE,),
    "cuCtxPopCurrent_v2": (_HANDLES,),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuMemAlloc_v2": (POINTER(_ADDRESS), c_size_t),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemHostAlloc": (_HANDLES, c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, c_void_p, c_size_t, _HANDLE),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _ADDRESS, c_size_t, _HANDLE),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, c_size_t, _HANDLE),
    "cuMemcpy2DAsync_v2": (POINTER(Memcpy2D), _HANDLE),
    "cuMemsetD8Async": (_ADDRESS, c_ubyte, c_size_t, _HANDLE),
    "cuMemsetD2D8Async": (_ADDRESS, c_size_t, c_ubyte, c_size_t, c_size_t, _HANDLE),
    "cuStreamCreate": (_HANDLES, c_uint),
    "cuStreamDestroy_v2": (_HANDLE,),
    "cuStreamSynchronize": (_HANDLE,),
    "cuStreamBeginCapture_v2": (_HANDLE, c_int),
    "cuStreamEndCapture": (_HANDLE, _HANDLES),
    "cuStreamIsCapturing": (_HANDLE, POINTER(c_int)),
    "cuGraphInstantiateWithFlags": (_HANDLES, _HANDLE, c_uint64),
    "cuGraphDestroy": (_HANDLE,),
    "cuGraphExecDestroy": (_HANDLE,),
    "cuGraphLaunch": (_HANDLE, _HANDLE),
    "cuEventCreate": (_HANDLES, c_uint),
    "cuEventDestroy_v2": (_HANDLE,),
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuEventSynchronize": (_HANDLE,),
}
"""Types of the functions' arguments, by the names that libcuda exports; cuda.h hides most suffixes _v2 from C."""

OLDEST = "CUDA 11.4"
"""The oldest version of CUDA that has all these functions: cuGraphInstantiateWithFlags is new in it."""
SPAWN = "load models in the child only, or start children by multiprocessing's spawn instead of fork"
"""Advice for CUDA in forked processes."""
REPORT = "open the model again; if it happens again, report it with the bundle's manifest"
"""Advice for errors that point to a defect."""
JETSON = "on a Jetson the user has to be in the group video, and a container needs --runtime nvidia"
"""Advice for a Jetson without a visible GPU."""
ADVICE = {
    2: "the device's memory is full: close what else uses it, or export smaller B, M or L",
    3: f"CUDA cannot be used in a process forked from one that uses it: {SPAWN}",
    34: "a stub of libcuda was found in place of the driver's own: take the folder of stubs out of LD_LIBRARY_PATH",
    46: "another process has the GPU for itself: end that, or use --backend cpu",
    100: f"no GPU is visible: look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use --backend cpu; {JETSON}",
    700: f"a kernel read or wrote where it must not, and nothing runs in this process any more: {REPORT}",
    709: "the device was reset by something else in this process: open the model after that, and reset no device",
    719: f"a kernel failed, and nothing runs in this process any more: {REPORT}",
    802: "the system of GPUs is not ready: see whether NVIDIA's fabric manager runs",
    803: "the kernel's driver and libcuda are of different versions: restart the machine after the driver's update",
    804: (
        "a package of CUDA's forward compatibility is installed, which this GPU does not support: remove it "
        "(cuda-compat), or take its folder out of LD_LIBRARY_PATH"
    ),
    900: "this work cannot be recorded",
    901: "something in this work cannot be recorded",
    999: f"the driver is in a bad state: look at nvidia-smi, and restart the machine if it fails too; {JETSON}",
}
"""Advice for CUDA's error codes; the advice for all other codes is `REPORT`."""

Call = Callable[..., None]
"""A function of the driver that raises `BackendError` if it fails."""


class Driver:
    """The initialised libcuda, with its functions as methods; a status other than success raises `BackendError`.

    Handles and addresses are plain integers; a function writes its results through `ctypes.byref`.

    Args:
        library: a `ctypes.CDLL`, or any object that has these functions.

    Attributes:
        forked: True if this process was forked from the process that opened the driver; CUDA does not work then.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Call: ...

    def __init__(self, library: Any) -> None:
        self.forked = False
        self._library = library
        self._functions = {name: _function(library, name) for name in SIGNATURES}
        for name, function in self._functions.items():
            setattr(self, name, self._checked(name, function))
        _drivers.add(self)
        self.cuInit(0)

    def _checked(self, name: str, function: Callable[..., int]) -> Call:
        def call(*arguments: Any) -> None:
            if status := function(*arguments):
                raise self.failure(name, status)

        return call

    def instant(self, name: str) -> Callable[..., int]:
        """Return a function that never waits, for use in every step: it takes ctypes objects and returns CUDA's status.

        The function keeps the interpreter's lock, because releasing the lock takes longer than the call.
        """
        if isinstance(self._library, ctypes.CDLL):
            return ctypes.PyDLL(CUDA_DRIVER, handle=self._library._handle)[name]
        return self._functions[name]

    def failure(self, name: str, status: int) -> BackendError:
        """Return the error for a function's status, with CUDA's name and text for the status, and advice."""
        called, description = self._text_of("cuGetErrorName", status), self._text_of("cuGetErrorString", status)
        details = ", ".join(part for part in (str(status), description) if part)
        return BackendError(
            f"{name} returned {called or 'a status that CUDA has no name for'} ({details}), expected success; "
            f"{ADVICE.get(status, REPORT)}"
        )

    def _text_of(self, name: str, status: int) -> str:
        text = c_char_p()
        failed = self._functions[name](status, ctypes.byref(text))
        return "" if failed or not text.value else text.value.decode(errors="replace")

    def quietly(self, name: str, *arguments: Any) -> None:
        """Call a function that frees something, ignoring failures; do nothing in a forked child."""
        if not self.forked:
            with contextlib.suppress(Exception):
                self._functions[name](*arguments)

    @contextlib.contextmanager
    def beside_records(self) -> Iterator[None]:
        """Return a context in which calls do not fail while a second thread records, and do not break its record."""
        mode = c_int(RELAXED)
        try:
            self.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            yield
        finally:
            try:
                self._leave_relaxed(mode)
            finally:  # call it a second time, in case Ctrl-C prevented the first call
                self._leave_relaxed(mode)

    def _leave_relaxed(self, before: c_int) -> None:
        """Restore the capture mode `before`; do nothing if it is RELAXED, as it is in the second of two calls."""
        if before.value != RELAXED:
            self.quietly("cuThreadExchangeStreamCaptureMode", ctypes.byref(before))

    def refuse_forked(self) -> None:
        """Raise a clear error in a forked process, in which the driver would hang, crash or say "not initialized".

        Raises:
            BackendError: this process is a fork of the process that opened the driver.
        """
        if self.forked:
            raise BackendError(
                "CUDA was opened in the process that this one was forked from, expected it to be opened in the process "
                f"that uses it; {SPAWN}"
            )


_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()


def _after_fork() -> None:
    for driver in _drivers:
        driver.forked = True


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)


def _function(library: Any, name: str) -> Callable[..., int]:
    """Return a function of the library with its signature, as a new prototype, so that other users of the library keep
    their settings.
    """
    try:
        if isinstance(library, ctypes.CDLL):
            function: Callable[..., int] = ctypes.CFUNCTYPE(c_int, *SIGNATURES[name])((name, library))
        else:
            function = getattr(library, name)
    except AttributeError:
        raise BackendError(f"{CUDA_DRIVER} has no {name}, expected a driver of {OLDEST} or newer; update it") from None
    return function


@cache
def open_driver() -> Driver:
    """Return the driver of this machine, opened once per process.

    Raises:
        BackendError: there is no driver, it is too old, or it has no GPU.
    """
    try:
        library = ctypes.CDLL(CUDA_DRIVER)
    except OSError as missing:
        raise BackendError(
            f"{CUDA_DRIVER} cannot be loaded ({missing}), expected NVIDIA's driver; install it, or use --backend cpu"
        ) from None
    return Driver(library)
