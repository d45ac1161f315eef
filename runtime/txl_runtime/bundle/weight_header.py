"""Where the tensors of a safetensors file lie, from its header alone: nothing of the weights is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from txl_runtime.errors import BundleError


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
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = msgspec.json.decode(file.read(size))
        found: dict[str, StoredTensor] = {}
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                found[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), 8 + size + first, last - first)
        return found
    except (OSError, OverflowError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"{path}: {error}; expected the bundle's weights; export the model again") from None
