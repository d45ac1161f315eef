"""Weights that the engines of a bundle read in one place on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from txl_runtime.bundle.reading import Bundle
from txl_runtime.device.cuda import Device, Queue
from txl_runtime.device.dtypes import stored_type, tensor_bytes
from txl_runtime.device.engines.sidecar import GivenWeight, distinct
from txl_runtime.device.interface import aligned, host_address


class SharedWeights:
    """All that a bundle's engines are given, in one block of the device; on the host one weight at a time.

    Args:
        device, queue: where they go, and whose turn it is then.

    Attributes:
        size: bytes of the block.

    Raises:
        BackendError: the device has not enough memory.
        BundleError: the bundle's file of weights ends before one of them, or is another one than was opened.
    """

    def __init__(self, bundle: Bundle, given: Sequence[GivenWeight], device: Device, queue: Queue) -> None:
        weights, self.size = distinct(given), 0
        self._starts = dict[tuple[int, tuple[int, ...]], int]()
        for place, weight in weights.items():
            self._starts[place] = self.size
            self.size += aligned(tensor_bytes(weight))
        places = [(weight.offset, tensor_bytes(weight)) for weight in weights.values()]
        parts = bundle.parts(bundle.manifest.weights, places)  # before memory is asked for, which may be of any size
        self._block = device.allocate(self.size)
        for weight, start, data in zip(weights.values(), self._starts.values(), parts, strict=True):
            values, shape = np.frombuffer(data, stored_type(weight.dtype)), weight.fixed
            if weight.turned:
                values = values.reshape(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2)
            values = np.ascontiguousarray(values)
            queue.send(self._block.address + start, host_address(values), values.nbytes)
            queue.wait()  # before the next one takes this one's memory on the host

    def addresses(self, given: Sequence[GivenWeight]) -> Mapping[str, int]:
        """Where each lies that an engine is given."""
        return {weight.name: self._block.address + self._starts[weight.place] for weight in given}
