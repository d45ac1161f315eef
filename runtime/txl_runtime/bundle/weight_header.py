"""A reader of safetensors headers: names, types, shapes and offsets of tensors, without reading the tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta, MsgspecError, Raw, Struct

from txl_runtime.errors import BundleError, brief, one_line
from txl_runtime.files import open_plain

MOST_BYTES = 100_000_000
"""Maximum size of a header in bytes, the same as in the safetensors library."""


Count = Annotated[int, Meta(ge=0, lt=2**62)]
"""A size or an offset in bytes, below 2**62."""


class Entry(Struct, frozen=True):
    """A tensor's entry in the header; `data_offsets` is the range of its bytes, [first, last), after the header.

    Unknown fields are ignored, as in the safetensors library.
    """

    dtype: str
    shape: Annotated[tuple[Count, ...], Meta(max_length=32)]
    data_offsets: tuple[Count, Count]


class Readable(Protocol):
    """An object that has a file's method `read`."""

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes."""
        ...


class StoredTensor(Struct, frozen=True):
    """A tensor of the file.

    Attributes:
        dtype: safetensors' name of the type, such as F32.
        shape: the tensor's sizes.
        offset: offset of the first byte from the beginning of the file.
        length: number of bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return every tensor's type, shape, offset and length in a safetensors file, by name.

    Raises:
        BundleError: the file cannot be read, or does not begin with a safetensors header.
    """
    try:
        with open_plain(path) as (file, facts):
            _, entries, start = decode_header(file, facts.st_size, MOST_BYTES)
        tensors: dict[str, StoredTensor] = {}
        for name, entry in entries.items():
            first, last = entry.data_offsets
            if not first <= last <= facts.st_size - start:
                raise ValueError(f"{name} lies behind the end of the file")
            tensors[name] = StoredTensor(entry.dtype, entry.shape, start + first, last - first)
        return tensors
    except (OSError, ValueError, RecursionError, MsgspecError) as error:
        raise BundleError(f"{path}: {one_line(error)}; expected the bundle's weights; export the model again") from None


def decode_header(file: Readable, size: int, most: int) -> tuple[dict[str, str], dict[str, Entry], int]:
    """Return the metadata of a safetensors file, its entries by tensor name, and the offset of the first tensor's byte.

    Args:
        file: a file at its beginning; it is read up to the end of the header.
        size: the file's size in bytes.
        most: maximum size of the header in bytes.

    Raises:
        ValueError, MsgspecError, RecursionError: the file does not begin with a safetensors header.
    """
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, most):
        raise ValueError(f"it has {size} bytes, and its header would take {length} bytes")
    header = msgspec.json.decode(file.read(length), type=dict[str, Raw])
    # The safetensors library treats "__metadata__": null as no metadata.
    facts = msgspec.json.decode(header.pop("__metadata__", Raw(b"null")), type=dict[str, str] | None) or {}
    return facts, {name: msgspec.json.decode(entry, type=Entry) for name, entry in header.items()}, 8 + length


def in_order(entries: Mapping[str, Entry], widths: Mapping[str, int], room: int) -> list[tuple[str, Entry]]:
    """Return the tensors in the order of their bytes; together they must fill the file without a gap or an overlap.

    Args:
        entries: the header's entries by tensor name.
        widths: number of bytes of a value, for each type that the caller can read.
        room: number of bytes after the header.

    Raises:
        ValueError: there is a gap or an overlap, or a tensor's type is not among `widths`.
    """
    ordered, end = sorted(entries.items(), key=lambda item: item[1].data_offsets), 0
    for name, entry in ordered:
        first, last = entry.data_offsets
        if entry.dtype not in widths:
            raise ValueError(f"{brief(name)} is of type {brief(entry.dtype)}, expected {', '.join(widths)}")
        if first != end or last - first != math.prod(entry.shape) * widths[entry.dtype]:
            place = f"{brief(name)} is {entry.dtype} {brief(str(list(entry.shape)))} at {first} … {last}"
            raise ValueError(f"{place}, expected it at {end}")
        end = last
    if end != room:
        raise ValueError(f"its tensors end at {end}, its data at {room}")
    return ordered
