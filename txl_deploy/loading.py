"""Load a bundle in a command, whose process does nothing else."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Mapping
from pathlib import Path

import txl_runtime
from txl_runtime.bundle.manifest import Manifest

SETTINGS = {-3: 2**25, -1: 2**26}
"""Values for glibc's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, the same that glibc sets after a block of 32 MiB is freed.

Without M_TRIM_THRESHOLD, a block of 1 MB that is freed and allocated again would go back to the system each time.
"""


def load_alone(bundle: Path, backend: str = "auto", threads: int | None = None) -> txl_runtime.Model:
    """Load a bundle as `txl_runtime.load` does, with matrices adjacent in memory, so that they fill more large pages.

    Without `SETTINGS`, the C library maps each matrix separately: 96 MB of a model were in large pages, and 144 MB with
    `SETTINGS`. They apply to the whole process, so `txl_runtime.load` leaves them to the application.

    Raises:
        TxlError: the errors of `txl_runtime.load`.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # a C library without mallopt, such as musl
            for name, value in SETTINGS.items():
                ctypes.CDLL(None).mallopt(name, value)
    return txl_runtime.load(bundle, backend=backend, threads=threads)


def absent_backends(reasons: Mapping[str, str], manifest: Manifest) -> dict[str, str]:
    """Return the reasons why backends do not run here: {"not rtx": reason} for each backend with engines in the bundle.

    All backends without engines in the bundle share one entry: {"not built": "tensorrt, cuda; --json says why"}.

    Args:
        reasons: for each backend, the reason why it does not run here; "" if it does.
        manifest: the bundle's manifest.
    """
    absent = {name: why for name, why in reasons.items() if why}
    built = [
        name for name in absent if any(file.startswith((f"engines/{name}/", f"{name}/")) for file in manifest.files)
    ]
    rest = ", ".join(name for name in absent if name not in built)
    return {f"not {name}": absent[name] for name in built} | ({"not built": f"{rest}; --json says why"} if rest else {})
