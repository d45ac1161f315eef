"""Check the packages that a verb needs, look up versions, and make the C library give freed memory back."""

from __future__ import annotations

import ctypes
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from txl_runtime.errors import BackendError
from txl_runtime.installing import pip_line


def require(verb: str, extra: str, *needed: str) -> None:
    """Check that the `needed` packages of an extra are installed, without which a verb does not run.

    Raises:
        BackendError: a package is missing; the message says how to install the extra.
    """
    if missing := [name for name in needed if find_spec(name) is None]:
        raise BackendError(f"{verb} needs {', '.join(missing)}, not installed here; {pip_line(extra)}")


def require_export(verb: str) -> None:
    """Check that PyTorch and the other packages of exports are installed; raise BackendError if one is missing."""
    require(verb, "export", "torch", "onnx", "onnxscript", "onnx_ir", "onnxruntime", "filelock")


def lean_heap() -> None:
    """Make glibc return blocks from 1 MiB to the system as soon as they are freed; other C libraries are unchanged.

    By default glibc learns to keep freed blocks of up to 32 MB on its heap. On this heap, blocks of PyTorch and of the
    engine alternate, so that freed memory cannot be used again.
    """
    m_mmap_threshold, bytes_from = -3, 1 << 20
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(m_mmap_threshold, bytes_from)


def version_of(package: str) -> str:
    """Return the installed version of a package; "not installed as a package" if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"
