"""The GPU of this machine: whether there is one, which asks nobody, and its name, which its driver says.

Every load on a CPU comes by here, so the driver's functions are imported when somebody asks for them.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from pathlib import Path

from txl_runtime.device.driver import Driver, open_driver
from txl_runtime.errors import BackendError

MULTIPROCESSORS, INTEGRATED, MAJOR, MINOR = 16, 18, 75, 76
"""CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, _INTEGRATED, _COMPUTE_CAPABILITY_MAJOR and _COMPUTE_CAPABILITY_MINOR."""
DEVICE_FILES = ("nvidia[0-9]*", "nvhost-gpu", "nvhost-ctrl-gpu", "nvgpu", "dxg")
"""In /dev: those of NVIDIA's driver, of a Jetson's (three), and of the Windows that a WSL runs in."""


def shows_gpu(devices: Path = Path("/dev")) -> bool:
    """Whether the machine shows a GPU, without a word to CUDA, which would not work in forked children afterwards."""
    if sys.platform == "win32":
        from ctypes.util import find_library

        return find_library("nvcuda") is not None
    return any(True for pattern in DEVICE_FILES for _ in devices.glob(pattern))


@cache
def gpu_name() -> str | None:
    """The first GPU's name and compute capability, e.g. "Orin, SM 87"; None without a GPU or a usable driver."""
    try:
        return device_title(open_driver(), 0)
    except BackendError:
        return None


def gpu_model() -> str | None:
    """The first GPU, as `gpu_name` and by its size: "Orin, SM 87, 8 multiprocessors". By name all Orin are one."""
    name = gpu_name()
    return name and f"{name}, {device_number(open_driver(), 0, MULTIPROCESSORS)} multiprocessors"


def device_title(driver: Driver, ordinal: int) -> str:
    """A GPU's name and compute capability, e.g. "Orin, SM 87"; asking makes no context.

    Raises:
        BackendError: there is no such device.
    """
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    driver.cuDeviceGetName(name, len(name), device.value)
    major, minor = (device_number(driver, ordinal, attribute) for attribute in (MAJOR, MINOR))
    return f"{name.value.decode(errors='replace')}, SM {major}{minor}"


def device_number(driver: Driver, ordinal: int, attribute: int) -> int:
    """One of the numbers that the driver tells of a GPU, by CUDA's own numbers for them; asking makes no context.

    Raises:
        BackendError: there is no such device.
    """
    device, value = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device.value)
    return value.value


def platform_name() -> str:
    """Operating system and processor, e.g. "linux-x86_64"."""
    return f"{sys.platform}-{platform.machine().lower()}"
