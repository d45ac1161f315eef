"""The GPU of this machine. Only its driver is asked, so no CUDA library has to be installed."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable
from functools import cache

MAJOR, MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""


@cache
def gpu_name() -> str | None:
    """The first GPU's name and compute capability, e.g. "Orin, SM 87"; None without a GPU or driver."""
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        calls: tuple[Callable[[], int], ...] = (
            lambda: cuda.cuInit(0),
            lambda: cuda.cuDeviceGet(ctypes.byref(device), 0),
            lambda: cuda.cuDeviceGetName(name, len(name), device),
            lambda: cuda.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, device),
            lambda: cuda.cuDeviceGetAttribute(ctypes.byref(minor), MINOR, device),
        )
        if any(call() != 0 for call in calls):
            return None
    except (OSError, AttributeError):
        return None
    return f"{name.value.decode(errors='replace')}, SM {major.value}{minor.value}"


def platform_name() -> str:
    """Operating system and processor, e.g. "linux-x86_64"."""
    return f"{sys.platform}-{platform.machine().lower()}"
