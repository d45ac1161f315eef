"""Giving freed memory back to the system.

Verifying holds a model's weights in memory several times, so the memory that tracing took has to be free by then. It is
not by itself: traced graphs refer to each other in cycles, which Python collects late, and glibc keeps freed blocks of
up to 32 MiB, the size of most weight matrices. After the export of a model of 1.1 GiB they were 1.0 GiB.
"""

from __future__ import annotations

import ctypes
import gc
import sys


def give_back() -> None:
    """Collect garbage, and hand freed blocks to the system."""
    gc.collect()
    trim()


def trim() -> None:
    """Hand freed blocks to the system where the C library is glibc."""
    found = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if found is not None:  # musl has none
        found(0)
