"""Blocks of device memory for a step's inputs and for its results, besides its state, and copies from and to the host.

All inputs are staged on the host and sent in one copy. Only the needed beginning of each axis of a result is fetched,
e.g. [b, T, V] of [B, L, V].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from txl_runtime.bundle.tables import TensorSpec, tensor_bytes
from txl_runtime.device.cuda import Device, Queue
from txl_runtime.device.dtypes import stored_type
from txl_runtime.device.interface import aligned, host_address
from txl_runtime.types import Array

Raw = NDArray[np.uint8]
"""Bytes of host memory."""


class Part(NamedTuple):
    """The beginning of each axis of a tensor on the device, fetched by one copy of equally spaced pieces.

    One copy can shorten only the first axis and one further axis. To get [:b, :T, :n] of [B, L, N], it fetches [b, L,
    n], from which `view` then takes [b, T, n].

    Attributes:
        address: device address of the first byte.
        dtype: type of the values.
        shape: shape of the fetched array.
        sizes: the wanted shape, no axis larger than in `shape`.
        width, rows, pitch: bytes per piece, number of pieces, and bytes from one piece to the next on the device.
    """

    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    width: int
    rows: int
    pitch: int

    @property
    def size(self) -> int:
        """The number of fetched bytes."""
        return self.width * self.rows

    def view(self, raw: Raw) -> Array:
        """Return a view of the wanted shape in the fetched bytes.

        For example, a float32 part [2, 3] is a view of the first 24 bytes.
        """
        array = raw[: self.size].view(self.dtype).reshape(self.shape)
        view: Array = array[tuple(slice(size) for size in self.sizes)]
        return view

    def fetch(self, queue: Queue, to: int) -> None:
        """Put a copy to the host address `to` into the queue; the pieces arrive without gaps."""
        queue.fetch(to, self.address, self.width, self.rows, self.width, self.pitch)

    def pieces(self, most: int) -> Iterator[tuple[int, int, int, int]]:
        """Split into copies of at most `most` bytes: yield (offset in the fetched bytes, device address,
        width, rows).
        """
        rows = most // self.width
        if rows:
            for first in range(0, self.rows, rows):
                at = first * self.width
                yield at, self.address + first * self.pitch, self.width, min(rows, self.rows - first)
            return
        for row in range(self.rows):
            for start in range(0, self.width, most):
                address = self.address + row * self.pitch + start
                yield row * self.width + start, address, min(most, self.width - start), 1


class Inputs:
    """A program's inputs besides its state: a block on the device, and a block on the host from which they are sent.

    Args:
        last: names of the inputs that come last in the blocks, in this order.

    Attributes:
        addresses, host: the device address and the host array of each input, by name.
    """

    def __init__(self, device: Device, specs: Sequence[TensorSpec], last: Sequence[str] = ()) -> None:
        ordered = sorted(specs, key=lambda spec: last.index(spec.name) if spec.name in last else -1)
        self._size, self._offsets = 0, dict[str, int]()
        for spec in ordered:
            self._offsets[spec.name] = self._size
            self._size += aligned(tensor_bytes(spec))
        self._block, self._staged = device.allocate(self._size), device.staging(self._size)
        self._from = host_address(self._staged)
        self.addresses = {name: self._block.address + offset for name, offset in self._offsets.items()}
        self.host: dict[str, Array] = {
            spec.name: self._staged[self._offsets[spec.name] :][: tensor_bytes(spec)]
            .view(stored_type(spec.dtype))
            .reshape(spec.fixed)
            for spec in specs
        }

    def rows(self, first: str, count: int) -> Array:
        """Return `count` consecutive int32 [B] inputs, beginning with the input `first`, as one view [count, B]."""
        (size,), start = self.host[first].shape, self._offsets[first]
        pitch = aligned(4 * size)
        table: Array = self._staged[start : start + count * pitch].view(np.int32).reshape(count, pitch // 4)
        return table[:, :size]

    def send(self, queue: Queue) -> None:
        """Put one copy of all inputs from the host to the device into the queue."""
        queue.send(self._block.address, self._from, self._size)


class Results:
    """A program's results besides its state, which stay on the device until they are fetched.

    Attributes:
        addresses: device address of each tensor, by name.
    """

    def __init__(self, device: Device, specs: Sequence[TensorSpec]) -> None:
        self._specs, size, offsets = {spec.name: spec for spec in specs}, 0, {}
        for spec in specs:
            offsets[spec.name] = size
            size += aligned(tensor_bytes(spec))
        self._block = device.allocate(size)
        self.addresses = {name: self._block.address + offset for name, offset in offsets.items()}

    def part(self, name: str, sizes: Sequence[int]) -> Part:
        """Return the part [:sizes[0], :sizes[1], …] of a result; axes beyond `sizes` are whole."""
        spec = self._specs[name]
        whole, dtype = spec.fixed, stored_type(spec.dtype)
        sizes = (*sizes, *whole[len(sizes) :])
        cut = max((axis for axis, size in enumerate(sizes) if size < whole[axis]), default=0)
        if not cut:
            width = math.prod(sizes) * dtype.itemsize
            return Part(self.addresses[name], dtype, sizes, sizes, width, 1, width)
        behind = math.prod(whole[cut + 1 :]) * dtype.itemsize
        shape = (sizes[0], *whole[1:cut], sizes[cut], *whole[cut + 1 :])
        rows, width = math.prod(shape[:cut]), behind * sizes[cut]
        return Part(self.addresses[name], dtype, shape, sizes, width, rows, behind * whole[cut])
