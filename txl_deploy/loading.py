"""Load a bundle in a command, whose process is its own."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path

import txl_runtime

M_MMAP_THRESHOLD = -3
LARGEST = 2**25
"""What the C library raises this threshold to by itself, once so large a block was freed."""


def load_alone(bundle: Path, backend: str = "auto", threads: int | None = None) -> txl_runtime.Model:
    """Load a bundle as `txl_runtime.load` does, with its matrices side by side, which fill more large pages.

    The C library otherwise maps each matrix by itself: 96 MB of a model were in large pages, and 144 MB with this
    setting. It is the whole process's, so `txl_runtime.load` leaves it to the application.

    Raises:
        as `txl_runtime.load`.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # a C library without it, such as musl
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGEST)
    return txl_runtime.load(bundle, backend=backend, threads=threads)
