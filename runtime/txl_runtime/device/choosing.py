"""The choice of a device backend for a bundle: the named backend, or the best that works, with the reasons against
others.

On a machine without a GPU the search must be cheap and must not start CUDA, because a process that is forked afterwards
could not use CUDA. So the search looks for engines first, then for packages without importing them, then for the files
of a GPU's driver; it starts CUDA only if it has found all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from txl_runtime.bundle.reading import Bundle
from txl_runtime.device.engines.library_features import how_to_install
from txl_runtime.device.gpu import gpu_name, shows_gpu
from txl_runtime.errors import BackendError, BundleError, TxlError, one_line
from txl_runtime.streaming.state import initial_values

if TYPE_CHECKING:
    from txl_runtime.device.backend import DeviceBackend

DEVICES = ("rtx", "tensorrt", "cuda")
"""Names of the backends that keep the state on a device, the preferred one first."""
PACKAGES = {"rtx": "tensorrt_rtx", "tensorrt": "tensorrt", "cuda": "onnxruntime"}
"""Python packages that backends need, by the backends' names."""
NO_GPU = "no usable CUDA driver was found, expected an NVIDIA GPU and its driver"
"""Reason why a device backend cannot run on a machine without a GPU."""

Opener = Callable[[str, Bundle, "str | None"], "DeviceBackend"]
"""A function (backend's name, bundle, update rule or None) → the opened backend."""


def open_device(name: str, bundle: Bundle, update: str | None) -> DeviceBackend:
    """Open a bundle with a backend of `DEVICES`; `update` is an update rule, or None for the best one available.

    Raises:
        BackendError: the backend is not installed, there is no GPU, or it cannot run the bundle.
        BundleError: a file of the bundle is damaged.
    """
    if reason := missing(name, bundle, insisting=True):
        raise BackendError(f"backend {name} cannot run here: {reason}; or use --backend cpu")
    with _errors_of(name):
        backend = _opened(name, bundle, update)
        if name == "cuda":  # the libraries of rtx and tensorrt check an engine against the GPU when they load it
            run_smallest(backend, bundle)
        return backend


def _opened(name: str, bundle: Bundle, update: str | None) -> DeviceBackend:
    if name == "cuda":
        from txl_runtime.device.onnxruntime_cuda import open_onnxruntime_cuda

        return open_onnxruntime_cuda(bundle, update)
    from txl_runtime.device.engines.opening import open_engines

    return open_engines(bundle, "rtx" if name == "rtx" else "tensorrt", update)


def run_smallest(backend: DeviceBackend, bundle: Bundle) -> None:
    """Run the smallest program on zeros, to find out whether an engine that opened has kernels for this GPU.

    The program runs twice, unrecorded and recorded: kernels that an engine compiles at first use are saved after the
    second run.

    Raises:
        BackendError: the program does not run here.
    """
    manifest = backend.fitting(bundle.manifest, 1)
    b, length = manifest.batch_size, min(manifest.segment_lengths)
    inputs = {entry.name: np.zeros(entry.sizes(b, length), entry.dtype) for entry in manifest.given}
    loop = backend.open_loop(manifest, initial_values(bundle))
    for _ in range(2):
        loop.run(inputs, np.full(b, length, np.int32), commit=False).outputs()


def choose_device(
    bundle: Bundle, update: str | None, opener: Opener = _opened
) -> tuple[DeviceBackend | None, dict[str, str]]:
    """Return (the best backend of `DEVICES` that runs the bundle, or None; by name, why each better one does not)."""
    notes = {}
    for name in DEVICES:
        if reason := missing(name, bundle):
            notes[name] = reason
            continue
        try:
            return _running(opener, name, bundle, update), notes
        except (BackendError, BundleError) as error:
            notes[name] = str(error)
    return None, notes


def _running(opener: Opener, name: str, bundle: Bundle, update: str | None) -> DeviceBackend:
    """Open and run a backend. If that fails, release the backend here, so that the next backend finds free device
    memory.
    """
    with _errors_of(name):
        backend = opener(name, bundle, update)
        run_smallest(backend, bundle)
        return backend


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """Turn any exception of a library that is being opened into a BackendError; an interrupt is passed on."""
    try:
        yield
    except TxlError:
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {one_line(error)}".rstrip(": ")
        raise BackendError(
            f"backend {name} could not be opened ({message}), expected its library to load the bundle or to say why "
            "not; install the library again, or use --backend cpu"
        ) from error


def missing(name: str, bundle: Bundle, built: bool = False, insisting: bool = False) -> str:
    """Return the reason why a backend cannot run on this machine, found without loading its library; "" if there is
    none.

    Args:
        built: True if engines are about to be built, so that missing engines are no reason.
        insisting: if no known file of a GPU's driver exists, ask CUDA's driver, because the GPU may be of an unknown
            kind.
    """
    package = PACKAGES[name]
    if problem := precision_problem(bundle.manifest.precision):
        return problem
    if not built and not any(file.startswith(f"engines/{name}/") for file in bundle.manifest.files):
        return f"the bundle has no engines for it, expected those of: txl-deploy build {bundle.path} --target {name}"
    if find_spec(package) is None:
        return f"{package} is not installed, expected it; {how_to_install(name)}"
    if not shows_gpu() and not (insisting and gpu_name() is not None):
        return NO_GPU
    return _without_cuda() if name == "cuda" else ""


def _without_cuda() -> str:
    """Return the reason why the installed ONNX Runtime cannot use a GPU; "" if it was built with CUDA."""
    from txl_runtime.device.onnxruntime_cuda import import_onnxruntime

    try:
        import_onnxruntime()
    except BackendError as error:
        return str(error)
    return ""


def precision_problem(precision: str) -> str:
    """Return the reason why no device backend runs a bundle of this precision; "" if some backend may."""
    if precision in ("int8", "int4"):
        return f"the bundle's precision is {precision}, which is for the CPU, expected fp32, fp16 or bf16"
    return ""
