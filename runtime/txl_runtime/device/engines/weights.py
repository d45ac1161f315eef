"""Weights on the device that all engines of a bundle share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from txl_runtime.bundle.reading import Bundle
from txl_runtime.device.cuda import Device, Queue
from txl_runtime.device.dtypes import stored_type, tensor_bytes
from txl_runtime.device.engines.sidecar import GivenWeight, distinct
from txl_runtime.device.interface import aligned, host_address


class SharedWeights:
    """All weights that a bundle's engines take as inputs, in one block of the device; the host holds one at a time.

    Args:
        device, queue: the device, and the queue that copies them.

    Attributes:
        size: bytes of the block.

    Raises:
        BackendError: the device has not enough memory.
        BundleError: the bundle's weight file is too short, or was replaced since the bundle was opened.
    """

    def __init__(self, bundle: Bundle, given: Sequence[GivenWeight], device: Device, queue: Queue) -> None:
        weights, self.size = distinct(given), 0
        self._starts = dict[tuple[int, tuple[int, ...]], int]()
        for place, weight in weights.items():
            self._starts[place] = self.size
            self.size += aligned(tensor_bytes(weight))
        places = [(weight.offset, tensor_bytes(weight)) for weight in weights.values()]
        parts = bundle.parts(bundle.manifest.weights, places)  # checked before memory of any size is allocated
        self._block = device.allocate(self.size)
        for weight, start, data in zip(weights.values(), self._starts.values(), parts, strict=True):
            values, shape = np.frombuffer(data, stored_type(weight.dtype)), weight.fixed
            if weight.turned:
                values = values.reshape(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2)
            values = np.ascontiguousarray(values)
            queue.send(self._block.address + start, host_address(values), values.nbytes)
            queue.wait()  # the copy must end before the host frees `values`

    def addresses(self, given: Sequence[GivenWeight]) -> Mapping[str, int]:
        """Return the device addresses of an engine's given weights by name."""
        return {weight.name: self._block.address + self._starts[weight.place] for weight in given}
