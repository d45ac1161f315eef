"""A safetensors file read whole: every size is checked before memory is taken, and no file stays mapped.

A mapped file that somebody cuts short kills the process. What is read here is at most the file and its header.
"""

from __future__ import annotations

import io

import numpy as np

from txl_runtime.bundle.weight_header import decode_header, in_order
from txl_runtime.errors import brief
from txl_runtime.types import Array

TYPES = {
    "BOOL": "?",
    **{f"{name}{8 * size}": f"<{kind}{size}" for name, kind in (("I", "i"), ("U", "u")) for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": f"<f{size}" for size in (2, 4, 8)},
}
"""NumPy's types by safetensors' names; it has none for BF16 and smaller floats, which nothing read here is kept in."""
WIDTHS = {name: np.dtype(kind).itemsize for name, kind in TYPES.items()}


def read_whole(file: io.BufferedReader | io.BytesIO, size: int, most: int) -> tuple[dict[str, str], dict[str, Array]]:
    """The metadata and the tensors, copies, of an open file of `size` bytes, whose header has `most` bytes at most.

    Raises:
        ValueError, MsgspecError, RecursionError: it is another kind of file, or it is damaged.
    """
    facts, entries, start = decode_header(file, size, most)
    tensors: dict[str, Array] = {}
    for name, entry in in_order(entries, WIDTHS, size - start):
        tensors[name] = np.empty(entry.shape, TYPES[entry.dtype])
        raw = tensors[name].reshape(-1).view(np.uint8)
        if file.readinto(raw.data) != raw.size:
            raise ValueError("it became shorter while it was read")
        if entry.dtype == "BOOL" and raw.max(initial=0) > 1:
            raise ValueError(f"{brief(name)} is BOOL and holds {raw.max()}")
    return facts, tensors
