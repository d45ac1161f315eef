"""Types of tensors on a device, and conversion from and to float32. NumPy has no bfloat16: uint16 holds its bits.

A bool is one byte, 0 or 1, as in TensorRT and ONNX Runtime.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from txl_runtime.bundle.tables import TensorSpec
from txl_runtime.errors import BackendError
from txl_runtime.types import Array, Floats

STORED: dict[str, np.dtype[Any]] = {
    "bool": np.dtype("?"),
    "int32": np.dtype("<i4"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}


def stored_type(name: str) -> np.dtype[Any]:
    """Return the NumPy type of stored values: uint16 for "bfloat16"."""
    if name not in STORED:
        raise BackendError(f"a tensor is {name}, expected one of {', '.join(STORED)}; export the model again")
    return STORED[name]


def tensor_bytes(spec: TensorSpec) -> int:
    """Return the bytes of a tensor of fixed shape: 24 for float32 [2, 3]."""
    return math.prod(spec.fixed) * stored_type(spec.dtype).itemsize


def to_float32(stored: Array, name: str) -> Floats:
    """Return stored values as float32, e.g. 1.0 for bfloat16 0x3F80; float32 is not copied."""
    if name == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32, copy=False)


def from_float32(values: Floats, name: str) -> Array:
    """Return float32 values as stored in a type, rounded to nearest, ties to even: 0x3F80 for 1.0 in bfloat16."""
    if name != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype(stored_type(name), copy=False)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
