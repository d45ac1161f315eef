"""Weights on the device that all engines of a bundle share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from txl_runtime.bundle.engines.sidecar import GivenWeight, Place, distinct
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import STATE_DTYPES, tensor_bytes
from txl_runtime.device.cuda import Device, Queue
from txl_runtime.device.dtypes import from_float32, stored_type, to_float32
from txl_runtime.device.interface import aligned, host_address


class SharedWeights:
    """All weights that a bundle's engines take as inputs, in one block of the device.

    The host holds one weight at a time, while it copies them.

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
        self._starts = dict[Place, int]()
        for place, weight in weights.items():
            self._starts[place] = self.size
            self.size += aligned(tensor_bytes(weight))
        # In the file, matrices that become int8 or fp8 codes have the dtype of the states.
        stored = STATE_DTYPES.get(bundle.manifest.precision, "float32")
        types = [weight.dtype if weight.scale is None else stored for weight in weights.values()]
        places = [
            (weight.offset, math.prod(weight.fixed) * stored_type(dtype).itemsize)
            for weight, dtype in zip(weights.values(), types, strict=True)
        ]
        parts = bundle.parts(bundle.manifest.weights, places)  # checks all places before memory is allocated
        self._block = device.allocate(self.size)
        for weight, start, data, dtype in zip(weights.values(), self._starts.values(), parts, types, strict=True):
            values, shape = np.frombuffer(data, stored_type(dtype)), weight.fixed
            if weight.scale is not None:
                values = from_float32(to_float32(values, dtype) / np.float32(weight.scale), weight.dtype)
            if weight.turned:
                values = values.reshape(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2)
            values = np.ascontiguousarray(values)
            queue.send(self._block.address + start, host_address(values), values.nbytes)
            queue.wait()  # the copy must end before the host frees `values`

    def addresses(self, given: Sequence[GivenWeight]) -> Mapping[str, int]:
        """Return the device addresses of an engine's given weights by name."""
        return {weight.name: self._block.address + self._starts[weight.place] for weight in given}
