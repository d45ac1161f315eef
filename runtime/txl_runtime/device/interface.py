"""What the loop asks of a device: memory, copies, work in order, work recorded. Small, so that tests can stand in.

Addresses are plain integers. Work of one queue is done in the order in which it was asked for; nothing here waits for
it but `Event.wait` and `Queue.wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from txl_runtime.bundle.tables import Program
from txl_runtime.device.dtypes import tensor_bytes
from txl_runtime.errors import BackendError

ALIGNMENT = 256
"""Every tensor starts at a multiple of so many bytes, as TensorRT asks."""

Launch = Callable[[], None]
"""Puts work into a queue."""


class Block(Protocol):
    """Memory on the device, given back when nobody holds it any more."""

    address: int


class Event(Protocol):
    """A place in a queue's work."""

    def wait(self) -> None:
        """Return when the work before it is done."""


class Queue(Protocol):
    """Work on the device, in order; CUDA calls it a stream, a word that is taken here.

    Attributes:
        handle: as engines want it.
    """

    handle: int

    def copy(self, to: int, source: int, width: int, rows: int = 1, to_pitch: int = 0, source_pitch: int = 0) -> None:
        """Copy rows of `width` bytes that lie `pitch` bytes apart; between host and device or within either.

        Host memory has to be left alone until the copy is done.
        """

    def zero(self, to: int, width: int, rows: int = 1, pitch: int = 0) -> None:
        """Set rows of bytes on the device to 0."""

    def record(self) -> Event:
        """A place after everything that was asked for."""

    def wait(self) -> None:
        """Return when everything is done."""

    def capture(self, work: Launch) -> Launch:
        """Record what `work` would put into the queue, without doing it; the result does all of it at once.

        Raises:
            BackendError: some of it cannot be recorded.
        """


class Device(Protocol):
    """A device with memory of its own.

    Attributes:
        title: for people.
        dlpack: its kind in DLPack's numbers, and which of its kind.
    """

    title: str
    dlpack: tuple[int, int]

    def allocate(self, size: int) -> Block:
        """Memory on the device, zeroed and aligned."""

    def staging(self, size: int) -> NDArray[np.uint8]:
        """Memory on the host that the device can copy from and to without help (page-locked)."""

    def queue(self) -> Queue:
        """A new queue."""


class Executable(Protocol):
    """A program, loaded by an engine.

    Attributes:
        program: what it computes; names, types and shapes of its tensors.
        in_place: outputs that have to share the memory of an input, and that input. Nothing else may overlap.
        recordable: whether its work can be captured. Where not, the engine has its own way to be quick, or none.
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
