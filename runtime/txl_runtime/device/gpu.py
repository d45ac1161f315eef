"""Functions that find out whether this machine has a GPU, without CUDA, and the GPU's name, from CUDA's driver.

Every load of a bundle runs this check, also on a CPU; the driver's library is opened only when it is needed.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from pathlib import Path

from txl_runtime.device.driver import Driver, open_driver
from txl_runtime.errors import BackendError
from txl_runtime.system import lists_driver

MULTIPROCESSORS, INTEGRATED, MAJOR, MINOR = 16, 18, 75, 76
"""CUDA's numbers of CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, _INTEGRATED, _COMPUTE_CAPABILITY_MAJOR and _MINOR."""
DEVICE_FILES = ("nvidia[0-9]*", "nvhost-gpu", "nvhost-ctrl-gpu", "nvgpu", "dxg")
"""Patterns of a GPU's device files in /dev: of NVIDIA's driver, of a Jetson (three patterns), and of WSL on Windows."""


def shows_gpu(devices: Path = Path("/dev")) -> bool:
    """Return whether the machine has a GPU's files, without starting CUDA, which would then fail in forked children."""
    return lists_driver() or any(True for pattern in DEVICE_FILES for _ in devices.glob(pattern))


@cache
def gpu_name() -> str | None:
    """Return the first GPU's name and compute capability, e.g. "Orin, SM 87"; None without a GPU or usable driver."""
    try:
        return device_title(open_driver(), 0)
    except BackendError:
        return None


def gpu_model() -> str | None:
    """Return `gpu_name` and the GPU's size, e.g. "Orin, SM 87, 8 multiprocessors": the same name has several sizes."""
    name = gpu_name()
    return name and f"{name}, {device_number(open_driver(), 0, MULTIPROCESSORS)} multiprocessors"


def device_title(driver: Driver, ordinal: int) -> str:
    """Return a GPU's name and compute capability, e.g. "Orin, SM 87", without making a context.

    Raises:
        BackendError: there is no such device.
    """
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    driver.cuDeviceGetName(name, len(name), device.value)
    major, minor = (device_number(driver, ordinal, attribute) for attribute in (MAJOR, MINOR))
    return f"{name.value.decode(errors='replace')}, SM {major}{minor}"


def device_number(driver: Driver, ordinal: int, attribute: int) -> int:
    """Return an attribute of a GPU, given CUDA's number of the attribute, without making a context.

    Raises:
        BackendError: there is no such device.
    """
    device, value = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device.value)
    return value.value


def platform_name() -> str:
    """Return the operating system and processor, e.g. "linux-x86_64"."""
    return f"{sys.platform}-{platform.machine().lower()}"
