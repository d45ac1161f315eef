"""Keys and values as the step in C reads them, in NumPy's arrays: float32, float16, or int8 with a scale of each row.

Keys of a head are a matrix [d_head, slots] in strips of 64 slots; values are [slots, d_head], padded to 16 numbers. The
step writes around the end of the ring, so nothing spills.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import numpy as np

from txl_runtime.bundle.tables import Program, StateTensor
from txl_runtime.host.placements import HostPlacement
from txl_runtime.streaming.state import Initial, SequenceCounters, ring_rows
from txl_runtime.types import Array, Arrays, Floats, Indices

STRIP, LANES = 64, 16


class NativeRing(HostPlacement):
    """A ring for the step in C; see `HostPlacement`.

    Attributes:
        tensors: arrays by state name: keys [B, H, strips, 64 · d_head], values [B, H, slots, padded d_head].
    """

    dtype: ClassVar[type[np.generic]] = np.float32

    def __init__(self, states: Sequence[StateTensor], initial: Initial, counters: SequenceCounters) -> None:
        super().__init__(states, initial, counters)
        first = states[0]
        assert first.slots is not None
        batch, heads, _, self._width = first.shape
        self._ring = slots = first.slots
        slot = np.arange(slots)[:, None]
        # indices of strips, [slots, 1], and indices in a strip, [slots, d_head]
        self._places = slot // STRIP, slot % STRIP + STRIP * np.arange(self._width)
        sizes = (-(-slots // STRIP), STRIP * self._width), (slots, -(-self._width // LANES) * LANES)
        scales = sizes[0][0] * STRIP, -(-slots // LANES) * LANES
        self.tensors: Arrays = {
            state.name: np.zeros((batch, heads), self._type(sizes[n % 2], scales[n % 2]))
            for n, state in enumerate(states)
        }
        self._keys = frozenset(state.name for state in states[::2])

    def bound(self, program: Program, side: int) -> tuple[Arrays, Arrays]:
        return {state.input: self.tensors[state.name] for state in self._states}, {}

    def take(self, row: int, fill: int, names: Collection[str] | None) -> dict[str, Array]:
        slots = ring_rows(int(self._counters.head[row]), fill, self._ring)
        return {
            name: np.ascontiguousarray(self._read(name, tensor[row], slots).swapaxes(0, 1))
            for name, tensor in self.tensors.items()
            if names is None or name in names
        }

    def put(self, row: int, tensors: Arrays) -> None:
        for name, tensor in self.tensors.items():
            slots = ring_rows(int(self._counters.head[row]), len(tensors[name]), self._ring)
            self._write(name, tensor[row], slots, tensors[name].swapaxes(0, 1))

    def clear(self, rows: Indices) -> None:
        every = np.arange(self._ring)
        for name, tensor in self.tensors.items():
            fresh, start = np.zeros(tensor.shape[1:], tensor.dtype), self._starts[name]
            wanted = (len(fresh), self._ring, self._width)
            self._write(name, fresh, every, np.broadcast_to(start[0] if start.ndim else start, wanted))
            tensor[rows] = fresh

    def reorder(self, rows: Indices, side: int) -> None:
        moved = {name: tensor[rows] for name, tensor in self.tensors.items()}
        self.clear(np.arange(self._batch))
        for name, tensor in self.tensors.items():
            tensor[: len(rows)] = moved[name]

    def _type(self, shape: tuple[int, int], scales: int) -> np.dtype[Any]:
        """Return the type of one head's part: values of this shape, and in int8 this number of scales."""
        return np.dtype((self.dtype, shape))

    def _read(self, name: str, tensor: Array, slots: Indices) -> Floats:
        """Return the rows of one sequence's tensor in these slots, float32 [H, n, d_head]."""
        return tensor[self._rows(name, slots)].astype(np.float32)

    def _write(self, name: str, tensor: Array, slots: Indices, values: Floats) -> None:
        with np.errstate(over="ignore"):  # half precision has infinity beyond 65,504
            tensor[self._rows(name, slots)] = values

    def _rows(self, name: str, slots: Indices) -> tuple[slice | Indices, ...]:
        """Return an index that gives the rows of one sequence's tensor in these slots, [H, n, d_head]."""
        if name in self._keys:
            strips, columns = self._places
            return slice(None), strips[slots], columns[slots]
        return slice(None), slots, slice(self._width)


class HalfRing(NativeRing):
    """A ring whose keys and values are float16."""

    dtype = np.float16


class ByteRing(NativeRing):
    """A ring in int8: for each head its codes, and behind the codes in memory a scale for each slot.

    As in C, a scale has 16 significant bits. So a code times its scale is exact in float32, and gives the same code and
    scale when it is put again.
    """

    dtype = np.int8

    def bound(self, program: Program, side: int) -> tuple[Arrays, Arrays]:
        inputs, outputs = super().bound(program, side)
        # add axes, up to the number of axes of the state
        return {name: tensor[..., None, None] for name, tensor in inputs.items()}, outputs

    def _type(self, shape: tuple[int, int], scales: int) -> np.dtype[Any]:
        return np.dtype([("codes", self.dtype, shape), ("scales", np.float32, scales)])

    def _read(self, name: str, tensor: Array, slots: Indices) -> Floats:
        codes: Floats = super()._read(name, tensor["codes"], slots)
        scales: Floats = tensor["scales"][:, slots, None]
        return codes * scales

    def _write(self, name: str, tensor: Array, slots: Indices, values: Floats) -> None:
        largest = np.abs(values).max(axis=-1).astype(np.float32)
        scales = np.where(largest < 1e-30, 0, largest / np.float32(127))
        scales = ((scales.view(np.uint32) + 0xFF) & 0xFFFFFF00).view(np.float32)
        scales = np.where(np.isfinite(largest), scales, np.float32(np.nan))
        whole = np.isfinite(scales) & (scales > 0)
        codes = np.rint(np.where(whole[..., None], values / np.where(whole, scales, 1)[..., None], 0))
        super()._write(name, tensor["codes"], slots, codes)
        tensor["scales"][:, slots] = scales
