"""Where a graph's parameters lie in the weight file, and what its nodes read, found without a package for graphs.

An ONNX file is nested protocol buffers: model.graph (field 7) · graph.node (1) · node.input (1) · graph.initializer (5)
· tensor.dims (1), data_type (2), name (8) and external_data (13), which is entries of key (1) and value (2). They are
read as `graph_check` reads them. Sizes are believed only where they agree with each other and with the file: what is
returned lies within it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from txl_runtime.guard.graph_check import GRAPH, MODEL, NODE, PAIR, TENSOR
from txl_runtime.guard.protobuf import RefusedError, Table, fields, signed, varints

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
        for body in _messages(graph, MODEL, 7):
            for tensor in _messages(body, GRAPH, 5):
                described = _describe(tensor, file)
                if described is not None:
                    name, dtype, dims, offset, length = described
                    fits = min(dims, default=0) >= 0 and math.prod(dims) * np.dtype(dtype).itemsize == length
                    if fits and 0 <= offset <= len(content) - length:
                        found[name] = content[offset : offset + length].view(dtype).reshape(dims)
    except (ValueError, OverflowError, RefusedError):
        return {}
    return found


def values_read(graph: bytes) -> frozenset[str]:
    """Names of the values that some node of a graph reads; an input may be none of them.

    Args:
        graph: an ONNX file that was checked.
    """
    nodes = (node for body in _messages(graph, MODEL, 7) for node in _messages(body, GRAPH, 1))
    return frozenset(name.decode() for node in nodes for name in _messages(node, NODE, 1))


def _describe(tensor: bytes, file: str) -> tuple[str, Any, list[int], int, int] | None:
    name, kind, dims, places = "", 0, list[int](), dict[str, str]()
    for number, value in fields(tensor, TENSOR, "a tensor"):
        if number == 1:
            dims += [signed(value)] if isinstance(value, int) else varints(value)
        elif number == 2 and isinstance(value, int):
            kind = value
        elif number == 8 and isinstance(value, bytes):
            name = value.decode()
        elif number == 13 and isinstance(value, bytes):
            entry = {side: text.decode() for side, text in fields(value, PAIR, "a place") if isinstance(text, bytes)}
            places[entry.get(1, "")] = entry.get(2, "")
    if places.get("location") != file or kind not in DTYPES:
        return None
    return name, DTYPES[kind], dims, int(places.get("offset", "0")), int(places.get("length", "-1"))


def _messages(message: bytes, known: Table, wanted: int) -> Iterator[bytes]:
    found = fields(message, known, "a message")
    return (value for number, value in found if number == wanted and isinstance(value, bytes))
