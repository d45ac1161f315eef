"""Which optional parts are installed."""

from __future__ import annotations

import ctypes
import sys
from importlib.util import find_spec

from txl_runtime.errors import BackendError

__all__ = ["lean_heap", "require_export"]


def require_export(verb: str) -> None:
    """Refuse a verb that needs PyTorch where it is not installed.

    Raises:
        BackendError: torch, onnx or onnxscript is missing.
    """
    missing = [name for name in ("torch", "onnx", "onnxscript", "onnx_ir", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise BackendError(f"{verb} needs {', '.join(missing)}, not installed here; pip install 'txl-deploy[export]'")


def lean_heap() -> None:
    """Have the C library give large blocks back when they are freed (glibc; elsewhere nothing happens).

    It learns from blocks of up to 32 MB to keep them on its heap, where those of PyTorch and of the engine then
    fragment each other's room (measured: docs/performance.md).
    """
    m_mmap_threshold, bytes_from = -3, 1 << 20
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(m_mmap_threshold, bytes_from)
