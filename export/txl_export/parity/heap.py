"""Freed memory back to the system.

A bundle is verified with its weights in memory several times over, so what tracing held must be gone by then. But
traced graphs are cycles, which Python collects when it sees fit, and glibc keeps freed blocks of up to 32 MiB, the size
of most weight matrices, for itself: a model of 1.1 GiB left 1.0 GiB behind.
"""

from __future__ import annotations

import ctypes
import gc
import sys

__all__ = ["give_back", "trim"]


def give_back() -> None:
    """Collect garbage, and hand freed blocks to the system."""
    gc.collect()
    trim()


def trim() -> None:
    """Hand freed blocks to the system where the C library is glibc."""
    found = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if found is not None:  # musl has none
        found(0)
