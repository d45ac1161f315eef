"""Where a graph's parameters lie in the weight file, and what its nodes read, found without a package for graphs.

An ONNX file is nested protocol buffers: model.graph (field 7) · graph.node (1) · node.input (1) · graph.initializer (5)
· tensor.dims (1), data_type (2), name (8) and external_data (13), which is entries of key (1) and value (2). Sizes are
believed only where they agree with each other and with the file: what is returned lies within it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

# By ONNX's numbers; numpy has no bfloat16, and its tensors are left to the engine.
DTYPES: dict[int, Any] = {1: np.float32, 2: np.uint8, 3: np.int8, 6: np.int32, 7: np.int64, 10: np.float16}


def external_tensors(graph: bytes, file: str, content: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    """The parameters of a graph that are ranges of a file, as views of its content.

    Args:
        graph: an ONNX file. What cannot be understood in it is left out: an engine that opens it says what is wrong.
        file: the name that the graph has for the file.
        content: all of it, uint8 [n].
    """
    found: dict[str, NDArray[Any]] = {}
    try:
        for body in _submessages(graph, 7):
            for tensor in _submessages(body, 5):
                described = _describe(tensor, file)
                if described is not None:
                    name, dtype, dims, offset, length = described
                    if math.prod(dims) * np.dtype(dtype).itemsize == length and 0 <= offset <= len(content) - length:
                        found[name] = content[offset : offset + length].view(dtype).reshape(dims)
    except (ValueError, IndexError, OverflowError):
        return {}
    return found


def values_read(graph: bytes) -> frozenset[str]:
    """Names of the values that some node of a graph reads; an input may be none of them.

    Args:
        graph: an ONNX file that an engine has opened.
    """
    nodes = (node for body in _submessages(graph, 7) for node in _submessages(body, 1))
    return frozenset(name.decode() for node in nodes for name in _submessages(node, 1))


def _describe(tensor: bytes, file: str) -> tuple[str, Any, list[int], int, int] | None:
    name, kind, dims, places = "", 0, list[int](), dict[str, str]()
    for number, value in _fields(tensor):
        if number == 1:
            dims += [value] if isinstance(value, int) else _varints(value)
        elif number == 2 and isinstance(value, int):
            kind = value
        elif number == 8 and isinstance(value, bytes):
            name = value.decode()
        elif number == 13 and isinstance(value, bytes):
            entry = dict(_fields(value))
            key, place = entry.get(1, b""), entry.get(2, b"")
            if isinstance(key, bytes) and isinstance(place, bytes):
                places[key.decode()] = place.decode()
    if places.get("location") != file or kind not in DTYPES:
        return None
    return name, DTYPES[kind], dims, int(places.get("offset", "0")), int(places.get("length", "-1"))


def _submessages(message: bytes, wanted: int) -> Iterator[bytes]:
    return (value for number, value in _fields(message) if number == wanted and isinstance(value, bytes))


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of every field: whole numbers, or the bytes of what has a length; others are skipped."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7 == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
        elif tag & 7 == 2:
            length, at = _varint(message, at)
            if length > len(message) - at:
                raise ValueError("a field is longer than what holds it")
            yield tag >> 3, message[at : at + length]
            at += length
        elif tag & 7 in (1, 5):
            at += 8 if tag & 7 == 1 else 4
        else:
            raise ValueError("a field of an unknown kind")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _varints(packed: bytes) -> list[int]:
    values, at = [], 0
    while at < len(packed):
        value, at = _varint(packed, at)
        values.append(value)
    return values
