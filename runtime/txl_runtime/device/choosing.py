"""Which backend runs a bundle on this machine: the one asked for, or the best that works, and why better ones do not.

Looking has to cost nothing where there is nothing to find: packages are looked for without importing them, and the
driver of a GPU is asked before any library that needs one is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from txl_runtime.bundle.reading import Bundle
from txl_runtime.device.gpu import gpu_name
from txl_runtime.errors import BackendError, BundleError

if TYPE_CHECKING:
    from txl_runtime.device.backend import DeviceBackend

DEVICES = ("rtx", "tensorrt", "cuda")
"""Backends that keep the memory on a device, the best first."""
PACKAGES = {"rtx": "tensorrt_rtx", "tensorrt": "tensorrt", "cuda": "onnxruntime"}
NO_GPU = "no usable CUDA driver was found, expected an NVIDIA GPU and its driver"
LEFT_OUT = {
    "cuda": (
        "it would compute wrong numbers on a GPU (ONNX Runtime has no CUDA kernel for one of the operators and copies "
        "its inputs to the CPU only once), so auto leaves it out until that is mended; --backend cuda runs "
        "it all the same"
    )
}
"""Backends that auto does not take, whatever is installed, and why."""

Opener = Callable[[str, Bundle, "str | None"], "DeviceBackend"]


def open_device(name: str, bundle: Bundle, update: str | None) -> DeviceBackend:
    """Open a bundle with a backend of `DEVICES`; `update` is the rule asked for, or None for the best there is.

    Raises:
        BackendError: the backend is not installed, there is no GPU, or it cannot run the bundle.
        BundleError: a file is damaged.
    """
    if reason := missing(name, bundle):
        raise BackendError(f"backend {name} cannot run here: {reason}; or use --backend cpu")
    if name == "cuda":
        from txl_runtime.device.onnxruntime_cuda import open_onnxruntime_cuda

        return open_onnxruntime_cuda(bundle, update)
    from txl_runtime.device.engines.opening import open_engines

    return open_engines(bundle, "rtx" if name == "rtx" else "tensorrt", update)


def choose_device(
    bundle: Bundle, update: str | None, opener: Opener = open_device
) -> tuple[DeviceBackend | None, dict[str, str]]:
    """The best backend of `DEVICES` that opens the bundle, if any does, and why those before it were not taken."""
    notes = {}
    for name in DEVICES:
        if reason := LEFT_OUT.get(name) or missing(name, bundle):
            notes[name] = reason
            continue
        try:
            return opener(name, bundle, update), notes
        except (BackendError, BundleError) as error:
            notes[name] = str(error)
    return None, notes


def missing(name: str, bundle: Bundle, built: bool = False) -> str:
    """What a backend lacks, as far as can be told without loading anything; empty when it lacks nothing.

    With `built`, engines are not missed: they will be there by then.
    """
    package = PACKAGES[name]
    if problem := precision_problem(bundle.manifest.precision):
        return problem
    if not built and not any(file.startswith(f"engines/{name}/") for file in bundle.manifest.files):
        return f"the bundle has no engines for it, expected those of: txl-deploy build {bundle.path} --target {name}"
    if find_spec(package) is None:
        return f"{package} is not installed, expected it; pip install 'txl-deploy[{name}]'"
    return "" if _has_gpu() else NO_GPU


def precision_problem(precision: str) -> str:
    """Why no device runs a bundle of a precision, whatever its backend; empty where one may."""
    if precision in ("int8", "int4"):
        return f"the bundle's precision is {precision}, which is for the CPU, expected fp32, fp16 or bf16"
    return ""


def _has_gpu() -> bool:
    """Whether a driver is installed and knows of a GPU; without a driver this costs one failed look-up."""
    return gpu_name() is not None
