"""The names of the backends, and what a caller may ask of one."""

from __future__ import annotations

from txl_runtime.errors import BackendError

DEVICES = ("rtx", "tensorrt", "cuda")
"""Backends that keep the memory on a device, the best first."""
NAMES = ("auto", "cpu", *DEVICES)


def check_choice(name: str, threads: int | None) -> None:
    """Check what a caller asks of a backend, before anything is opened.

    Raises:
        BackendError: there is no such backend, or no such number of threads.
    """
    if name not in NAMES:
        raise BackendError(f"backend {name!r} is unknown, expected one of {', '.join(NAMES)}")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise BackendError(f"threads is {threads!r}, expected a whole number of at least 1, or None for all cores")
