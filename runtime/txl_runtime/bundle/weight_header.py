"""Where the tensors of a safetensors file lie, from its header alone: nothing of the weights is read."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import msgspec
from msgspec import MsgspecError, Struct

from txl_runtime.bundle.folder import FLAGS
from txl_runtime.errors import BundleError, one_line

MOST_BYTES = 100_000_000
"""Of a header, as safetensors itself allows."""


class StoredTensor(Struct, frozen=True):
    """One tensor of the file.

    Attributes:
        dtype: as safetensors names it, such as F32.
        shape: its sizes.
        offset: of its first byte, from the beginning of the file.
        length: in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a safetensors file by name.

    Raises:
        BundleError: the file cannot be read, or does not begin with such a header.
    """
    try:
        with os.fdopen(os.open(os.path.realpath(path), FLAGS), "rb") as file:  # a pipe does not hang
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise ValueError("no plain file")
            whole, size = facts.st_size, int.from_bytes(file.read(8), "little")
            if size > min(MOST_BYTES, whole):
                raise ValueError(f"its header would take {size} bytes")
            header: dict[str, Any] = msgspec.json.decode(file.read(size))
        found: dict[str, StoredTensor] = {}
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                if not 0 <= first <= last <= whole - 8 - size:
                    raise ValueError(f"{name} lies behind the end of the file")
                found[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), 8 + size + first, last - first)
        return found
    except (
        OSError,
        ValueError,
        ArithmeticError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        MsgspecError,
    ) as error:
        raise BundleError(f"{path}: {one_line(error)}; expected the bundle's weights; export the model again") from None
