"""A process in which the stand-in for CUDA's driver is this machine's: whoever loads libcuda is given it.

`sitecustomize` calls `stand_in` before a program of the GPU check starts; the program is not changed.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from functools import cache
from typing import Any

REAL = ctypes.CDLL


def stand_in() -> None:
    """Give the stand-in to whoever loads the driver's library."""

    class Library(REAL):
        def __new__(cls, name: Any, *_: Any, **__: Any) -> Any:
            return _driver() if name == "libcuda.so.1" else super().__new__(cls)

    ctypes.CDLL = Library  # type: ignore[misc]


@cache
def _driver() -> Any:
    from stand_ins.driver import FakeDriver

    main, driver = sys.modules["__main__"], FakeDriver(seed=0, capacity=2**26)
    if hasattr(main, "Smoke"):  # its sizes are a GPU's
        real = main.Smoke
        main.Smoke = lambda opened, device, _: real(opened, device, 2**16, 2**12)
    if hasattr(main, "CudaPlace"):
        from stand_ins.late_place import LatePlace

        main.CudaPlace = lambda: LatePlace(driver)
        main.torch.cuda.is_available = lambda: True
        main.torch.set_num_threads(1)
    atexit.register(_check, driver)
    return driver


def _check(driver: Any) -> None:
    """End with a status of its own where a GPU would have gone wrong without a word."""
    if driver.violations:
        print(driver.violations, file=sys.stderr, flush=True)
        os._exit(7)
