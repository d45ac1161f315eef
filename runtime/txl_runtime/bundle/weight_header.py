"""Where the tensors of a safetensors file lie, from its header alone: nothing of the tensors is read."""

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
"""Of a header, as safetensors itself allows."""


Count = Annotated[int, Meta(ge=0, lt=2**62)]


class Entry(Struct, frozen=True):
    """What the header says of one tensor; offsets are from the first tensor's byte on.

    Whatever else a header says of a tensor is ignored, as the safetensors library ignores it.
    """

    dtype: str
    shape: Annotated[tuple[Count, ...], Meta(max_length=32)]
    data_offsets: tuple[Count, Count]


class Readable(Protocol):
    """A file, or what reads one."""

    def read(self, size: int, /) -> bytes:
        """At most so many bytes."""
        ...


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


def decode_header(file: Readable, size: int, most: int) -> tuple[dict[str, str], dict[str, Entry], int]:
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


def in_order(entries: Mapping[str, Entry], widths: Mapping[str, int], room: int) -> list[tuple[str, Entry]]:
    """The tensors in the order of their bytes, which they fill without a gap and without lying over one another.

    Args:
        entries: what the header says.
        widths: bytes of a value, by the types that whoever reads the file knows.
        room: bytes behind the header.

    Raises:
        ValueError: they do not, or one is of another type.
    """
    ordered, end = sorted(entries.items(), key=lambda item: item[1].data_offsets), 0
    for name, entry in ordered:
        first, last = entry.data_offsets
        if entry.dtype not in widths:
            raise ValueError(f"{brief(name)} is of type {brief(entry.dtype)}, expected {', '.join(widths)}")
        if first != end or last - first != math.prod(entry.shape) * widths[entry.dtype]:
            found = f"{brief(name)} is {entry.dtype} {brief(str(list(entry.shape)))} at {first} … {last}"
            raise ValueError(f"{found}, expected it at {end}")
        end = last
    if end != room:
        raise ValueError(f"its tensors end at {end}, its data at {room}")
    return ordered
