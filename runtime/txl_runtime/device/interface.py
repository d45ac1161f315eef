"""What the loops ask of an engine: programs that are tied to addresses and then put into a queue.

Addresses are plain integers. What the loops ask of CUDA itself is in `cuda`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from txl_runtime.bundle.tables import Program
from txl_runtime.device.cuda import Queue
from txl_runtime.device.dtypes import tensor_bytes
from txl_runtime.errors import BackendError

ALIGNMENT = 256
"""Every tensor starts at a multiple of so many bytes, as TensorRT asks."""

Launch = Callable[[], None]
"""Puts work into a queue."""


class Executable(Protocol):
    """A program, loaded by an engine.

    Attributes:
        program: what it computes; names, types and shapes of its tensors.
        in_place: outputs that have to share the memory of an input, and that input. Nothing else may overlap.
        recordable: whether its work can be captured; `prepare` may find that it cannot. Then the engine has its own way
            to be quick, or none.
    """

    program: Program
    in_place: Mapping[str, str]
    recordable: bool

    def prepare(self, addresses: Mapping[str, int], queue: Queue) -> Launch:
        """Tie it to memory for good; what it needs to work in is its own, so different ties may be run in turns."""


def aligned(size: int) -> int:
    """The size with what is missing to the next start."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def check_addresses(executable: Executable, addresses: Mapping[str, int]) -> None:
    """Inputs and outputs may share memory only where the engine says they must, and there they must.

    Engines read inputs while they write outputs, and no one notices when those are the same memory: results are wrong.

    Raises:
        BackendError: tensors that overlap, lie apart, or are not aligned.
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
    """Where an array's data starts."""
    return int(array.ctypes.data)
