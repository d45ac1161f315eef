"""A bundle's parameters in the form that the step in C takes: each head's columns are padded, int8 has codes and a
scale per column, int4 has codes and a scale and a zero per column and block of inputs.

Every tensor's type and shape is compared with the manifest's config before its address is passed to C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.weight_header import StoredTensor, read_header
from txl_runtime.errors import BackendError, BundleError
from txl_runtime.types import Array, Floats

LANES, BLOCKS = 16, (32, 64, 128)
DTYPES = {"F32": "float32", "I8": "int8", "U8": "uint8", "I32": "int32"}


@dataclass(frozen=True)
class Matrix:
    """A matrix [in, out] in float32, or as int8 codes with `scales`, float32 [out]."""

    values: Array
    scales: Floats | None = None

    def padded(self, axis: int, heads: int, width: int) -> Matrix:
        """Return the matrix with each head's `width` rows or columns zero-padded to the next multiple of 16."""
        scales = None if self.scales is None or not axis else pad_heads(self.scales, 0, heads, width)
        return Matrix(pad_heads(self.values, axis, heads, width), self.scales if scales is None else scales)


@dataclass(frozen=True)
class Blocks:
    """A matrix [in, out] in int4, as a bundle stores it.

    Attributes:
        size: the number `in`; the last block may have codes beyond it.
        codes: uint8 [out, blocks, block / 2]: two codes per byte, the first in the low half.
        scales, zeros: float32 and uint8 [out, blocks]; a value is scale · (code - zero).
    """

    size: int
    codes: Array
    scales: Floats
    zeros: Array

    def padded(self, axis: int, heads: int, width: int) -> Blocks | Matrix:
        """Return the matrix with each head's `width` columns padded; padding rows, which blocks span, makes float32."""
        if width % LANES == 0:
            return self
        if not axis:
            return self.plain().padded(axis, heads, width)
        return Blocks(self.size, *(pad_heads(part, 0, heads, width) for part in (self.codes, self.scales, self.zeros)))

    def plain(self) -> Matrix:
        """Return the matrix in float32."""
        codes = np.stack((self.codes & 15, self.codes >> 4), axis=-1).reshape(*self.codes.shape[:2], -1)
        values = (codes - self.zeros[..., None].astype(np.float32)) * self.scales[..., None]
        return Matrix(np.ascontiguousarray(values.reshape(len(codes), -1)[:, : self.size].T))


def pad_heads(array: NDArray[np.generic], axis: int, heads: int, width: int) -> Array:
    """Return an array whose axis [heads · width] becomes [heads · padded width], with zeros after each head.

    Example:
        >>> pad_heads(np.ones((5, 2 * 24)), 1, 2, 24).shape
        (5, 64)
    """
    parts = array.reshape(*array.shape[:axis], heads, width, *array.shape[axis + 1 :])
    gaps = [(0, 0)] * parts.ndim
    gaps[axis + 1] = 0, -width % LANES
    shape = (*array.shape[:axis], heads * (width + gaps[axis + 1][1]), *array.shape[axis + 1 :])
    return np.ascontiguousarray(np.pad(parts, gaps).reshape(shape))


class Parameters:
    """The tensors of a bundle's weight file, each checked when it is read."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle, self._path = bundle, bundle.file(bundle.manifest.weights)

    @cached_property
    def _entries(self) -> dict[str, StoredTensor]:
        return read_header(self._path)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def tensor(self, name: str, shape: Sequence[int], dtype: str = "float32") -> Array:
        """Return a tensor, C-contiguous.

        For example, `tensor("softmax.biases.0", [256])`.

        Raises:
            BundleError: the tensor is missing, or of a different type or shape.
        """
        entry = self._entries.get(name)
        if entry is None or DTYPES.get(entry.dtype) != dtype or entry.shape != tuple(shape):
            has = "missing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
            wanted = f"{dtype} {list(shape)}"
            raise BundleError(f"{self._path}: {name} is {has}, expected {wanted}; export the model again")
        return np.ascontiguousarray(self._bundle.weights(name)[name])

    def optional(self, name: str, shape: Sequence[int]) -> Floats | None:
        """Return a tensor in float32, or None if there is none of that name.

        For example, `optional("softmax.biases.0", [256])`.
        """
        return self.tensor(name, shape) if name in self else None

    def matrix(self, name: str, size: int, width: int) -> Matrix | Blocks:
        """Return a matrix [size, width] as float32, int8 or int4, whichever the bundle has.

        Raises:
            BackendError: the matrix's int8 codes have several scales in a column.
        """
        if f"{name}.columns" in self:
            codes = self._codes(name, self.tensor(f"{name}.columns", (size, width), "int8"))
            return Matrix(codes, self.tensor(f"{name}.column_scale", (width,)))
        if f"{name}.int4" in self:
            return self._blocks(name, size, width)
        stored = self._entries.get(f"{name}.int8")
        if stored is None:
            return Matrix(self.tensor(name, (size, width)))
        block = _last(stored)
        blocks = self.tensor(f"{name}.int8", (width, -(-size // block), block), "uint8")
        scales = self._reshaped(f"{name}.scale", (width, blocks.shape[1]))
        if (scales != scales[:, :1]).any():
            raise BackendError(
                f"{self._path}: {name} has a scale for each block, expected one for each column, which backend native "
                "takes; export the model again"
            )
        codes = (blocks.reshape(width, -1)[:, :size].T.astype(np.int16) - 128).astype(np.int8)
        return Matrix(np.ascontiguousarray(self._codes(name, codes)), np.ascontiguousarray(scales[:, 0]))

    def _blocks(self, name: str, size: int, width: int) -> Blocks:
        block = 2 * _last(self._entries[f"{name}.int4"])
        if block not in BLOCKS:  # C has room for the codes and sums of a row in blocks of these sizes
            raise BackendError(f"{self._path}: {name} has blocks of {block}, expected 32, 64 or 128; export it again")
        count = -(-size // block)
        codes = self.tensor(f"{name}.int4", (width, count, block // 2), "uint8")
        scales = self._reshaped(f"{name}.scale", (width, count))
        packed = self._reshaped(f"{name}.zero", (width, -(-count // 2)), "uint8")
        zeros = np.stack((packed & 15, packed >> 4), axis=-1).reshape(width, -1)[:, :count]
        return Blocks(size, codes, scales, np.ascontiguousarray(zeros))

    def _reshaped(self, name: str, shape: tuple[int, int], dtype: str = "float32") -> Array:
        """Return a tensor that is stored as this matrix or, by other versions of the quantiser, in one dimension."""
        stored = self._entries.get(name)
        flat = stored is not None and len(stored.shape) == 1
        return self.tensor(name, (shape[0] * shape[1],) if flat else shape, dtype).reshape(shape)

    def _codes(self, name: str, codes: Array) -> Array:
        if codes.min(initial=0) == -128:  # AVX2 cannot negate -128, and quantising makes no such code
            raise BackendError(f"{self._path}: {name} has the code -128, expected -127 … 127; export the model again")
        return codes

    def largest(self, start: str, shape: Sequence[int]) -> Floats:
        """Return the tensor [*shape, columns] with the most columns among those whose names are `start` and a number.

        Tables of positions of several programs differ only in the largest distance. For example, if there are
        positions.1 [2, 4, 9] and positions.8 [2, 4, 16], the second is returned.
        """
        widths = {
            name: entry.shape[-1] for name, entry in self._entries.items() if name.startswith(start) and entry.shape
        }
        named = {name: columns for name, columns in widths.items() if name.removeprefix(start).isdecimal()}
        best = max(named, key=lambda name: named[name], default=f"{start}00001")
        return self.tensor(best, (*shape, named.get(best, 1)))


def _last(stored: StoredTensor) -> int:
    """Return the last size of a tensor of blocks; 1 for a tensor of a different form, which no bundle has."""
    return stored.shape[-1] if len(stored.shape) == 3 and stored.shape[-1] else 1
