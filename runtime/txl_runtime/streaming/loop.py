"""Engines: one module each, behind one small protocol.

A backend opens a bundle's programs. `bind` ties a program to arrays the caller owns and returns a `Call`; running the
call reads the input arrays, writes the output arrays and allocates nothing. The same arrays may be bound many times,
by many streams; a call may not run twice at the same time, different calls may.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import Program
from txl_runtime.errors import BackendError

__all__ = ["DEVICES", "NAMES", "Arrays", "Backend", "Call", "check_choice", "open_backend"]

DEVICES = ("rtx", "tensorrt", "cuda")
"""Backends that keep the memory on a device, the best first."""
NAMES = ("auto", "cpu", *DEVICES)

Arrays = Mapping[str, NDArray[Any]]
Call = Callable[[], None]


class Backend(Protocol):
    """An engine that has opened a bundle.

    Attributes:
        name, description: of the engine, for programs and for people.
        least_rows: from this many rows on, what a softmax program gives a row does not depend on how many there are.
    """

    name: str
    description: str
    least_rows: int

    def bind(self, program: Program, inputs: Arrays, outputs: Arrays) -> Call:
        """Tie a program to C-contiguous arrays of the program's shapes and dtypes.

        Arrays of a softmax program may have any number of rows. Outputs may not overlap inputs, but for the state of
        a ring: there one array is both.
        """
        ...


def open_backend(
    bundle: Bundle, programs: Sequence[Program], threads: int | None = None, lean: bool = False
) -> Backend:
    """Open some programs of a bundle on the CPU. Devices are `txl_runtime.device.choosing`'s.

    Raises:
        BackendError: the engine is not installed, or cannot run the bundle.
    """
    from txl_runtime.host.onnxruntime_cpu import OnnxRuntimeCpu

    return OnnxRuntimeCpu(bundle, programs, threads, lean)


def check_choice(name: str, threads: int | None) -> None:
    """What a caller asks of a backend, checked before anything is opened.

    Raises:
        BackendError: there is no such backend, or no such number of threads.
    """
    if name not in NAMES:
        raise BackendError(f"backend {name!r} is unknown, expected one of {', '.join(NAMES)}")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise BackendError(f"threads is {threads!r}, expected a whole number of at least 1, or None for all cores")
