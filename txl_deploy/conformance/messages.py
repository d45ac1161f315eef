"""What a runner and a driver say to each other: promises by name, arrays and bytes as JSON."""

from __future__ import annotations

import base64
import binascii
import math
from typing import Any

import numpy as np
from txl_runtime.errors import UsageError
from txl_runtime.types import Array

# fmt: off
PROMISES = [
    "padding", "idle", "last", "cut", "fill", "spill", "initial", "reset", "select",
    "snapshot", "rows", "limit", "commit", "lookahead", "lockstep", "grows", "open", "score",
    "greedy", "draws", "apart", "temperature", "top_k", "top_p", "clusters", "text", "selftest",
    "refusals", "int8", "half", "old", "axes", "strangers",
]
# fmt: on
"""What vectors show; `conformance/README.md` says what each means."""
DTYPES = ("float32", "float16", "int32", "bool")


def packed(array: Array) -> dict[str, Any]:
    """An array as JSON: dtype, shape, and its values as base64 of little-endian bytes in C order."""
    ordered = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": packed_bytes(ordered.tobytes())}


def unpacked(document: Any) -> Array:
    """The array that `packed` made JSON of.

    Raises:
        UsageError: it is something else.
    """
    if not is_array(document):
        raise UsageError(f"an array is {str(document)[:80]}, expected dtype, shape and data")
    name, shape, data = document["dtype"], document["shape"], unpacked_bytes(document["data"])
    sizes = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if name not in DTYPES or not sizes or math.prod(shape) * np.dtype(name).itemsize != len(data):
        raise UsageError(
            f"an array is {name} {shape} of {len(data)} bytes, expected one of {', '.join(DTYPES)} and as many"
        )
    try:
        return np.frombuffer(data, np.dtype(name).newbyteorder("<")).astype(name).reshape(shape)
    except ValueError as error:  # of no numbers, such as [2**62, 2**62, 0], or of more axes than NumPy has
        raise UsageError(f"an array is {name} {str(shape)[:80]} ({error}), expected one that NumPy can hold") from None


def is_array(document: object) -> bool:
    """Whether JSON has the form of an array."""
    return isinstance(document, dict) and document.keys() == {"dtype", "shape", "data"}


def packed_bytes(data: bytes) -> str:
    """Bytes as JSON: base64."""
    return base64.b64encode(data).decode()


def unpacked_bytes(text: Any) -> bytes:
    """The bytes that `packed_bytes` made JSON of.

    Raises:
        UsageError: it is no base64.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise UsageError(f"bytes are {str(text)[:80]!r}, expected base64") from None
