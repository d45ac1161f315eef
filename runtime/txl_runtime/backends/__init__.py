"""Engines: one module each, behind one small protocol.

A backend opens a bundle's programs. `bind` ties a program to arrays the caller owns and returns a `Call`; running the
call reads the input arrays, writes the output arrays and allocates nothing. The same arrays may be bound many times,
by many streams; a call may not run twice at the same time, different calls may.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from txl_runtime.bundle import Bundle
from txl_runtime.errors import BackendError
from txl_runtime.manifest import Program

__all__ = ["BACKENDS", "Arrays", "Backend", "Call", "open_backend"]

Arrays = Mapping[str, NDArray[Any]]
Call = Callable[[], None]


class Backend(Protocol):
    """An engine that has opened a bundle."""

    name: str
    description: str

    def bind(self, program: Program, inputs: Arrays, outputs: Arrays) -> Call:
        """Tie a program to C-contiguous arrays of the program's shapes and dtypes.

        Arrays of a softmax program may have any number of rows. Outputs may not overlap inputs, but for the state of
        a ring: there one array is both.
        """
        ...


def _cpu(bundle: Bundle, programs: Sequence[Program], threads: int | None, lean: bool) -> Backend:
    from txl_runtime.backends.onnxruntime_cpu import OnnxRuntimeCpu

    return OnnxRuntimeCpu(bundle, programs, threads, lean)


BACKENDS: dict[str, Callable[[Bundle, Sequence[Program], int | None, bool], Backend]] = {"cpu": _cpu}
PLANNED = ("cuda", "tensorrt", "rtx")


def open_backend(
    name: str, bundle: Bundle, programs: Sequence[Program], threads: int | None = None, lean: bool = False
) -> Backend:
    """Open some programs of a bundle with the named engine; "auto" takes the best there is.

    Raises:
        BackendError: the engine is unknown, not installed, or cannot run the bundle.
    """
    chosen = "cpu" if name == "auto" else name
    if chosen in PLANNED:
        raise BackendError(f"backend {name!r} is not in this version, expected auto or cpu; use --backend cpu")
    if chosen not in BACKENDS:
        raise BackendError(f"backend {name!r} is unknown, expected one of auto, {', '.join(BACKENDS)}")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise BackendError(f"threads is {threads!r}, expected a whole number of at least 1, or None for all cores")
    return BACKENDS[chosen](bundle, programs, threads, lean)
