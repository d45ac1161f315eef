"""A program that stands beside the streams, run on the CPU whatever runs the streams; it is opened at its first use."""

from __future__ import annotations

from collections.abc import Callable

from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import Program
from txl_runtime.errors import BundleError
from txl_runtime.host.onnxruntime_cpu import OnnxRuntimeCpu
from txl_runtime.types import Arrays


def open_look(bundle: Bundle, program: Program, threads: int | None) -> Callable[[Program, Arrays], Arrays]:
    """What runs this program, and nothing else. Its weights stay where the file is mapped into memory.

    Raises:
        BackendError: the engine is not installed.
        BundleError: the graph is not what the manifest says, or the bundle was replaced since it was loaded.
    """
    engine = OnnxRuntimeCpu(bundle, (program,), threads, lean=True)
    if not bundle.folder.holds(bundle.manifest.weights):
        raise BundleError(
            f"{bundle.path}: holds other weights than the bundle that was loaded, expected the same; load it again"
        )
    return engine.run
