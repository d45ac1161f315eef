"""What PyTorch's side of the tools needs: its packages, and a heap that gives memory back."""

from __future__ import annotations

import ctypes
import sys
from importlib.util import find_spec

from txl_runtime.errors import BackendError
from txl_runtime.installing import pip_line


def require_export(verb: str) -> None:
    """Refuse a verb that needs PyTorch where it is not installed.

    Raises:
        BackendError: torch or another package of the extra is missing.
    """
    needed = ("torch", "onnx", "onnxscript", "onnx_ir", "onnxruntime", "filelock")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise BackendError(f"{verb} needs {', '.join(missing)}, not installed here; {pip_line('export')}")


def require_packaging(verb: str, *more: str) -> None:
    """Refuse a verb that needs what the extra `build` installs, where that is missing.

    Args:
        verb: for the message.
        more: packages besides the one that puts folders into place.

    Raises:
        BackendError: one is not installed.
    """
    missing = [name for name in ("filelock", *more) if find_spec(name) is None]
    if missing:
        raise BackendError(f"{verb} needs {', '.join(missing)}, not installed here; {pip_line('build')}")


def lean_heap() -> None:
    """Have glibc give large blocks back as soon as they are freed; with another C library nothing happens.

    By default glibc learns to keep freed blocks of up to 32 MB on its heap, where the blocks of PyTorch and those of
    the engine fragment each other's room.
    """
    m_mmap_threshold, bytes_from = -3, 1 << 20
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(m_mmap_threshold, bytes_from)
