"""The protocol of an engine on a device, whose programs are bound to addresses and then put into a queue.

Addresses are plain integers. Calls of CUDA itself are in `cuda`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from txl_runtime.bundle.tables import Program, tensor_bytes
from txl_runtime.device.cuda import Queue
from txl_runtime.errors import BackendError

ALIGNMENT = 256
"""Alignment of every tensor's first byte, in bytes; TensorRT requires it."""

Launch = Callable[[], None]
"""A function that puts work into a queue."""


class Executable(Protocol):
    """A program that an engine has loaded.

    Attributes:
        program: the program's row, with names, types and shapes of its tensors.
        in_place: for each output that must share an input's memory, that input's name. No other tensors may overlap.
        recordable: whether the loop can record the program's work; `prepare` may set it to False if the engine makes
            its own record, or cannot be recorded.
    """

    program: Program
    in_place: Mapping[str, str]
    recordable: bool

    def prepare(self, addresses: Mapping[str, int], queue: Queue) -> Launch:
        """Bind the program to addresses for good, and return a function that launches it. Functions of different
        addresses may be called in turns.
        """


def aligned(size: int) -> int:
    """Return the size rounded up to a multiple of 256 (`ALIGNMENT`): 512 for 300."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def check_addresses(executable: Executable, addresses: Mapping[str, int]) -> None:
    """Check that an output shares memory with an input if, and only if, the engine updates that input in place.

    Engines read inputs while they write outputs, so overlapping memory would give wrong results without an error.

    Raises:
        BackendError: tensors overlap, an in-place output is not at its input's address, or a tensor is not aligned.
    """
    program = executable.program
    ranges = {spec.name: (addresses[spec.name], tensor_bytes(spec)) for spec in (*program.inputs, *program.outputs)}
    for name, (start, _) in ranges.items():
        if start % ALIGNMENT:
            raise BackendError(f"program {program.name}: {name} is at {start:#x}, expected a multiple of {ALIGNMENT}")
    written = [spec.name for spec in program.outputs]
    for index, output in enumerate(written):
        shared = executable.in_place.get(output)
        if shared is not None and ranges[shared][0] != ranges[output][0]:
            raise BackendError(
                f"program {program.name}: {output} is updated in place, expected it where {shared} is; bind one buffer"
            )
        for other in (*(spec.name for spec in program.inputs), *written[:index]):
            (start, size), (begin, length) = ranges[output], ranges[other]
            if other != shared and start < begin + length and begin < start + size:
                raise BackendError(
                    f"program {program.name}: {output} overlaps {other}, which the engine does not update in place, "
                    "expected memory of their own; bind two buffers in turns"
                )


def host_address(array: NDArray[Any]) -> int:
    """Return the address of an array's first byte in host memory, as `array.ctypes.data` gives it."""
    return int(array.ctypes.data)
