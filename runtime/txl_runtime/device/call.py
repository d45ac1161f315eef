"""One program of one loop, tied to memory: what goes in and comes out, and the work of a step.

What a step reads beside its state is one block, staged on the host and sent in one copy. What it returns beside its
state stays on the device until it is asked for; only as much of it as was asked for comes back, into staging memory.
The first step runs as it is, since engines set themselves up in it; the second is recorded, and from then on a step is
the replay of that record.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from txl_runtime.bundle.tables import TensorSpec
from txl_runtime.device.dlpack import DeviceTokens
from txl_runtime.device.dtypes import stored_type, tensor_bytes
from txl_runtime.device.interface import (
    Device,
    Executable,
    Launch,
    Queue,
    aligned,
    check_addresses,
    host_address,
)
from txl_runtime.errors import BackendError
from txl_runtime.types import Array

logger = logging.getLogger(__name__)


class TensorBlock:
    """Tensors of any types, one behind the other: on the device, and the same on the host, staged for copies.

    Attributes:
        addresses, host: of each tensor on the device, and as an array of the host; by name.
        size: bytes of all of them.
    """

    def __init__(self, device: Device, specs: Sequence[TensorSpec]) -> None:
        size, offsets = 0, {}
        for spec in specs:
            offsets[spec.name] = size
            size += aligned(tensor_bytes(spec))
        self._block, self._staged = device.allocate(size), device.staging(size)
        self.size = size
        self.addresses = {name: self._block.address + offset for name, offset in offsets.items()}
        self.host: dict[str, Array] = {
            spec.name: self._staged[offsets[spec.name] :][: tensor_bytes(spec)]
            .view(stored_type(spec.dtype))
            .reshape(spec.fixed)
            for spec in specs
        }

    def send(self, queue: Queue) -> None:
        """Everything that is staged, in one copy."""
        queue.copy(self._block.address, host_address(self._staged), self.size)

    def fetch(self, queue: Queue, name: str, sizes: tuple[int, ...]) -> Array:
        """Copy the beginning of each axis of a tensor to the host; a view of that, good once the queue was waited for.

        It is one copy with a pitch: of axes in front of the last one that is cut, all but the first come whole.
        """
        host = self.host[name]
        part: Array = host[tuple(slice(size) for size in sizes)]
        cut = max((axis for axis, size in enumerate(sizes) if size < host.shape[axis]), default=0)
        width, rows, pitch = part.nbytes, 1, 0
        if cut:
            after = host.itemsize * math.prod(host.shape[cut + 1 :])
            width, pitch = after * sizes[cut], after * host.shape[cut]
            rows = sizes[0] * math.prod(host.shape[1:cut])
        queue.copy(host_address(host), self.addresses[name], width, rows, pitch, pitch)
        return part


class DeviceCall:
    """An executable tied to its inputs, its results and one side of a loop's memory.

    Args:
        executable: what runs.
        queue: where.
        inputs, results: what it reads and returns beside the memory.
        memory: where the states are that it reads and writes, by the names of its inputs and of its outputs.
    """

    def __init__(
        self,
        executable: Executable,
        queue: Queue,
        inputs: TensorBlock,
        results: TensorBlock,
        memory: tuple[Mapping[str, int], Mapping[str, int]],
    ) -> None:
        addresses: dict[str, int] = {**inputs.addresses, **results.addresses, **memory[0], **memory[1]}
        check_addresses(executable, addresses)
        self._executable, self._queue, self._inputs = executable, queue, inputs
        self._launch: Launch = executable.prepare(addresses, queue)
        self.steps = 0
        self.recorded = "not yet" if executable.recordable else "by the engine"  # or "recorded", or why it is not

    def step(self, values: Mapping[str, Array], resident: Mapping[str, DeviceTokens]) -> None:
        """Put a step into the queue.

        Args:
            values: what goes into the inputs, from the beginning of each axis on.
            resident: ids that are on the device already, by the inputs' names.
        """
        for name, array in values.items():
            self._inputs.host[name][tuple(slice(size) for size in array.shape)] = array
        self._inputs.send(self._queue)
        for name, ids in resident.items():
            count, width = ids.shape
            pitch = 4 * self._inputs.host[name].shape[1]
            self._queue.copy(self._inputs.addresses[name], ids.address, 4 * width, count, pitch, ids.pitch)
        if self.steps == 1 and self._executable.recordable:
            try:
                self._launch, self.recorded = self._queue.capture(self._launch), "recorded"
            except BackendError as error:
                self.recorded = str(error)
                logger.warning("%s runs without being recorded: %s", self._executable.program.name, error)
        self._launch()
        self.steps += 1


def open_blocks(
    device: Device, executable: Executable, memory: tuple[Mapping[str, int], Mapping[str, int]]
) -> tuple[TensorBlock, TensorBlock]:
    """Blocks for what a program reads and returns beside the memory."""
    sides = (executable.program.inputs, executable.program.outputs)
    inputs, results = (
        [spec for spec in side if spec.name not in held] for side, held in zip(sides, memory, strict=True)
    )
    return TensorBlock(device, inputs), TensorBlock(device, results)
