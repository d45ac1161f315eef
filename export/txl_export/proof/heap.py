"""Returns freed memory to the operating system.

Verification holds a model's weights in memory several times, so the memory that tracing took must be free by then. By
default it is not: traced graphs are reference cycles, which Python collects late, and glibc keeps freed blocks of up to
32 MiB, the size of most weight matrices. After the export of a model of 1.1 GiB, glibc kept 1.0 GiB.
"""

from __future__ import annotations

import ctypes
import gc
import sys


def give_back() -> None:
    """Collect garbage, then return freed blocks to the system."""
    gc.collect()
    trim()


def trim() -> None:
    """Return freed blocks to the system; do nothing without glibc."""
    function = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if function is not None:  # musl, another C library, lacks malloc_trim
        function(0)
