"""Which backend runs a bundle here: the one asked for, or the best that works, and why the better ones do not.

Looking must cost nothing where there is nothing: packages are looked for, not imported, and a GPU's driver is asked
before any library of its is.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from txl_runtime.backends import DEVICES
from txl_runtime.bundle.reading import Bundle
from txl_runtime.errors import BackendError, BundleError

if TYPE_CHECKING:
    from txl_runtime.device.backend import DeviceBackend

__all__ = ["choose_device", "missing", "open_device"]

PACKAGES = {"rtx": "tensorrt_rtx", "tensorrt": "tensorrt", "cuda": "onnxruntime"}
NO_GPU = "no usable CUDA driver was found, expected an NVIDIA GPU and its driver"

Opener = Callable[[str, Bundle, "str | None"], "DeviceBackend"]


def open_device(name: str, bundle: Bundle, update: str | None) -> DeviceBackend:
    """Open a bundle with a backend of `DEVICES`.

    Args:
        name: of the backend.
        bundle: to open.
        update: the rule asked for, or None for the best there is.

    Raises:
        BackendError: it is not installed, there is no GPU, or it cannot run the bundle.
        BundleError: a file is damaged.
    """
    if reason := missing(name, bundle):
        raise BackendError(f"backend {name} cannot run here: {reason}; or use --backend cpu")
    if name == "cuda":
        return _open_cuda(bundle, update)
    from txl_runtime.device.engines.opening import open_engines

    return open_engines(bundle, "rtx" if name == "rtx" else "tensorrt", update)


def choose_device(
    bundle: Bundle, update: str | None, opener: Opener = open_device
) -> tuple[DeviceBackend | None, dict[str, str]]:
    """The best backend of `DEVICES` that opens the bundle, if any does, and why those before it do not."""
    notes = {}
    for name in DEVICES:
        if reason := missing(name, bundle):
            notes[name] = reason
            continue
        try:
            return opener(name, bundle, update), notes
        except (BackendError, BundleError) as error:
            notes[name] = str(error)
    return None, notes


def missing(name: str, bundle: Bundle, built: bool = False) -> str:
    """What a backend lacks, as far as can be told without loading anything; empty for nothing.

    Args:
        name: of the backend.
        bundle: to be opened.
        built: its engines will have been built by then.
    """
    package = PACKAGES[name]
    if name != "cuda" and not built and not any(file.startswith(f"engines/{name}/") for file in bundle.manifest.files):
        return f"the bundle has no engines for it, expected those of: txl-deploy build {bundle.path} --target {name}"
    if bundle.manifest.precision in ("int8", "int4"):
        return (
            f"the bundle's precision is {bundle.manifest.precision}, which is for the CPU, expected fp32, fp16 or bf16"
        )
    if find_spec(package) is None:
        return f"{package} is not installed, expected it; pip install 'txl-deploy[{name}]'"
    return "" if _has_gpu() else NO_GPU


@cache
def _has_gpu() -> bool:
    """Whether a driver is there and knows of a GPU; the one without the other costs only a look."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    from txl_runtime.device.gpu import gpu_name

    return gpu_name() is not None


def _open_cuda(bundle: Bundle, update: str | None) -> DeviceBackend:
    from txl_runtime.device.onnxruntime_cuda import open_onnxruntime_cuda

    return open_onnxruntime_cuda(bundle, update)
