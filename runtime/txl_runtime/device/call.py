"""One program of one loop, tied to memory: what goes in and comes out, and the work of a step.

Counts and tokens of a step are one block, staged on the host and sent in one copy. The result comes back into staging
memory, and only as much of it as was asked for. The first step runs as it is, since engines set themselves up in it;
the second is recorded, and from then on a step is the replay of that record.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from txl_runtime.device.dlpack import DeviceTokens
from txl_runtime.device.dtypes import tensor_bytes
from txl_runtime.device.interface import (
    Device,
    Event,
    Executable,
    Launch,
    Queue,
    aligned,
    check_addresses,
    host_address,
)
from txl_runtime.errors import BackendError
from txl_runtime.types import Array, Floats, Ids

logger = logging.getLogger(__name__)


class InputBlock:
    """The int32 inputs of a program that are no memory: on the device, and as they will be sent."""

    def __init__(self, device: Device, executable: Executable, states: frozenset[str]) -> None:
        self._specs = [spec for spec in executable.program.inputs if spec.name not in states]
        wrong = [spec.name for spec in self._specs if spec.dtype != "int32"]
        if wrong:
            raise BackendError(
                f"{executable.program.name}: {wrong[0]} is no int32, expected tokens and counts; rebuild"
            )
        size, offsets = 0, {}
        for spec in self._specs:
            offsets[spec.name] = size
            size += aligned(tensor_bytes(spec))
        self._block, self._staged = device.allocate(size), device.staging(size)
        self.size = size
        self.addresses = {name: self._block.address + offset for name, offset in offsets.items()}
        self.host: dict[str, Ids] = {
            spec.name: self._staged[offsets[spec.name] :][: tensor_bytes(spec)].view(np.int32).reshape(spec.fixed)
            for spec in self._specs
        }

    def send(self, queue: Queue) -> None:
        """Everything that is staged, in one copy."""
        queue.copy(self._block.address, host_address(self._staged), self.size)


class ResultBlock:
    """The first output of a program: on the device, and where it comes back to."""

    def __init__(self, device: Device, executable: Executable) -> None:
        spec = executable.program.outputs[0]
        if spec.dtype != "float32":
            raise BackendError(f"{executable.program.name}: {spec.name} is {spec.dtype}, expected float32; rebuild")
        self.name, self._shape = spec.name, spec.fixed
        self._block, staged = device.allocate(tensor_bytes(spec)), device.staging(tensor_bytes(spec))
        self.address = self._block.address
        self.host: Floats = staged.view(np.float32).reshape(self._shape)

    def fetch(self, queue: Queue, rows: int, columns: int) -> None:
        """Copy the first columns of the first sequences to the host; of [B, V] the whole rows."""
        pitch = self.host.itemsize * int(np.prod(self._shape[1:]))
        width = pitch // self._shape[1] * columns if columns else pitch
        queue.copy(host_address(self.host), self.address, width, rows, pitch, pitch)


class DeviceCall:
    """An executable tied to its inputs, its result and one side of a loop's memory."""

    def __init__(
        self,
        executable: Executable,
        queue: Queue,
        inputs: InputBlock,
        result: ResultBlock,
        memory: tuple[Mapping[str, int], Mapping[str, int]],
    ) -> None:
        addresses: dict[str, int] = {**inputs.addresses, result.name: result.address, **memory[0], **memory[1]}
        check_addresses(executable, addresses)
        self._executable, self._queue, self._inputs, self._result = executable, queue, inputs, result
        self._launch: Launch = executable.prepare(addresses, queue)
        self.steps = 0
        self.recorded = "not yet" if executable.recordable else "by the engine"  # or "recorded", or why it is not

    def step(self, values: Mapping[str, Array], resident: Mapping[str, DeviceTokens], rows: int, columns: int) -> Event:
        """Put a step into the queue; the result is there when the event is.

        Args:
            values: what goes into the inputs, from their first row and column on.
            resident: ids that are on the device already, by the inputs' names.
            rows, columns: how much of the result to fetch; columns 0 for whole rows.
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
        self._result.fetch(self._queue, rows, columns)
        return self._queue.record()
