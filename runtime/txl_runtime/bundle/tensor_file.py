"""A reader of whole safetensors files: it checks every size before it allocates, and maps no file.

A process that maps a file is killed if the file is truncated. Reading takes memory of at most the file's size and
header.
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
"""NumPy types by safetensors' names. NumPy lacks types for BF16 and smaller floats; the files that this module reads
hold no such values.
"""
WIDTHS = {name: np.dtype(kind).itemsize for name, kind in TYPES.items()}
"""Number of bytes of a value, by safetensors' names of types."""


def read_whole(file: io.BufferedReader | io.BytesIO, size: int, most: int) -> tuple[dict[str, str], dict[str, Array]]:
    """Return the metadata of an open file, and copies of its tensors. The file has `size` bytes, its header at most
    `most`.

    For example, ({"format": "pt"}, {"h": [1, 8]}).

    Raises:
        ValueError, MsgspecError, RecursionError: the file is of a different kind, or damaged.
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
