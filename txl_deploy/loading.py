"""Load a bundle in a command, whose process is its own."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path

import txl_runtime

SETTINGS = {-3: 2**25, -1: 2**26}
"""glibc's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, as glibc sets them itself once a block of 32 MiB was freed.

Without the second, memory of 1 MB that is freed and asked for again would go to the system and come back each time.
"""


def load_alone(bundle: Path, backend: str = "auto", threads: int | None = None) -> txl_runtime.Model:
    """Load a bundle as `txl_runtime.load` does, with its matrices side by side, which fill more large pages.

    The C library otherwise maps each matrix by itself: 96 MB of a model were in large pages, and 144 MB with these
    settings. They are the whole process's, so `txl_runtime.load` leaves it to the application.

    Raises:
        as `txl_runtime.load`.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # a C library without it, such as musl
            for name, value in SETTINGS.items():
                ctypes.CDLL(None).mallopt(name, value)
    return txl_runtime.load(bundle, backend=backend, threads=threads)
