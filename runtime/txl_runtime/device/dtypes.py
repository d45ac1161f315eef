"""Types of tensors on a device, and conversion from and to float32. NumPy has no bfloat16: its bits are held as uint16.

A bool is one byte, 0 or 1, as in TensorRT and ONNX Runtime. float8e4m3fn is a sign, four bits of exponent and three of
fraction, up to 448, without infinities; it is held as uint8.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from txl_runtime.errors import BackendError
from txl_runtime.types import Array, Floats

STORED: dict[str, np.dtype[Any]] = {
    "bool": np.dtype("?"),
    "int8": np.dtype("i1"),
    "float8e4m3fn": np.dtype("u1"),
    "int32": np.dtype("<i4"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}
"""NumPy type in which values of each type are stored; bfloat16 and float8e4m3fn as their bits."""
LARGEST = {"int8": 127, "float8e4m3fn": 448}
"""Largest value of each type that rounded weights have; int8 is used symmetrically, without -128."""


def stored_type(name: str) -> np.dtype[Any]:
    """Return the NumPy type in which values of a type are stored: uint16 for "bfloat16"."""
    if name not in STORED:
        raise BackendError(f"a tensor is {name}, expected one of {', '.join(STORED)}; export the model again")
    return STORED[name]


def to_float32(stored: Array, name: str) -> Floats:
    """Return stored values as float32, e.g. 1.0 for bfloat16 0x3F80; float32 is not copied."""
    if name == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    if name == "float8e4m3fn":
        exponents, fractions = stored >> 3 & 15, stored & 7
        whole = np.where(exponents, fractions + 8, fractions).astype(np.float32)
        sizes: Floats = np.ldexp(whole, np.maximum(exponents, 1).astype(np.int32) - 10)
        return np.where(stored & 128, -sizes, sizes)
    return stored.astype(np.float32, copy=False)


def from_float32(values: Floats, name: str) -> Array:
    """Convert float32 values to a stored type, rounded to nearest, ties to even: 1.0 as bfloat16 is 0x3F80.

    Values beyond the largest value of a type in `LARGEST` become that value.

    Example:
        >>> [hex(bits) for bits in from_float32(np.float32([1, -2]), "bfloat16")]
        ['0x3f80', '0xc000']
    """
    if name in LARGEST:
        values = np.clip(values, -LARGEST[name], LARGEST[name])
    if name == "int8":
        values = np.rint(values)
    if name == "float8e4m3fn":
        sizes = np.abs(values)
        bits = sizes.view(np.uint32)
        # change float32's exponent bias of 127 to 7; below the smallest normal number, codes count steps of 1 / 512
        codes = (bits + 0x7FFFF + (bits >> 20 & 1) >> 20) - (120 << 3)
        codes = np.where(sizes < 2**-6, np.rint(sizes * 512), codes).astype(np.uint8)
        return codes | np.signbit(values) * np.uint8(128)
    if name != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype(stored_type(name), copy=False)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
