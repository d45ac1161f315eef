"""Where the tensors of a safetensors file lie, from its header alone: nothing of the weights is read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta, MsgspecError, Raw, Struct

from txl_runtime.errors import BundleError, one_line
from txl_runtime.files import open_plain

MOST_BYTES = 100_000_000
"""Of a header, as safetensors itself allows."""


Count = Annotated[int, Meta(ge=0, lt=2**62)]


class Entry(Struct, frozen=True):
    """What the header says of one tensor; offsets are from the first tensor's byte on."""

    dtype: str
    shape: Annotated[tuple[Count, ...], Meta(max_length=32)]
    data_offsets: tuple[Count, Count]


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
        with open_plain(path) as (file, facts):
            _, entries, start = decode_header(file, facts.st_size, MOST_BYTES)
        found: dict[str, StoredTensor] = {}
        for name, entry in entries.items():
            first, last = entry.data_offsets
            if not first <= last <= facts.st_size - start:
                raise ValueError(f"{name} lies behind the end of the file")
            found[name] = StoredTensor(entry.dtype, entry.shape, start + first, last - first)
        return found
    except (OSError, ValueError, RecursionError, MsgspecError) as error:
        raise BundleError(f"{path}: {one_line(error)}; expected the bundle's weights; export the model again") from None


def decode_header(file: BinaryIO, size: int, most: int) -> tuple[dict[str, str], dict[str, Entry], int]:
    """The metadata of a safetensors file, what its header says of the tensors, and where their bytes begin.

    Args:
        file: at its beginning; read up to the end of the header.
        size: of the file, in bytes.
        most: bytes that a header may have.

    Raises:
        ValueError, MsgspecError, RecursionError: it does not begin with such a header.
    """
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, most):
        raise ValueError(f"it has {size} bytes, and its header would take {length} bytes")
    header = msgspec.json.decode(file.read(length), type=dict[str, Raw])
    # The library takes a null here for no metadata.
    facts = msgspec.json.decode(header.pop("__metadata__", Raw(b"null")), type=dict[str, str] | None) or {}
    return facts, {name: msgspec.json.decode(entry, type=Entry) for name, entry in header.items()}, 8 + length
