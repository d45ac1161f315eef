"""The files safetensors writes: a JSON header with places, then the tensors, without gaps.

The safetensors library maps a file into memory, and a file that somebody cuts short meanwhile ends the process. So the
header is read here, in a page of code, and the tensors are copied out of the open file, which is hashed on the way.
"""

from __future__ import annotations

import hashlib
import io
import math
from typing import Annotated

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor
from txl_runtime.errors import CheckpointError

from txl_export.checkpoints.files.pickle_names import DIMENSION_LIMIT, shown

HEADER_LIMIT = 100_000_000
"""The library's own."""
TYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_Count = Annotated[int, Meta(ge=0, le=2**62)]


class _Place(Struct, forbid_unknown_fields=True):
    """One tensor: its type, shape, and first byte and end behind the header."""

    dtype: str
    shape: Annotated[list[_Count], Meta(max_length=DIMENSION_LIMIT)]
    data_offsets: tuple[_Count, _Count]


def is_safetensors(head: bytes, size: int) -> bool:
    """Whether a file begins like safetensors: the header's length, then its JSON."""
    return len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8


def read_safetensors(file: io.BufferedReader, size: int) -> tuple[dict[str, Tensor], str]:
    """The tensors by name, and the file's SHA-256.

    Raises:
        CheckpointError: it is not valid, or has a type torch does not know.
    """
    file.seek(0)
    first = file.read(8)
    length = int.from_bytes(first, "little")
    if length > min(HEADER_LIMIT, size - 8):
        raise _refusal(f"its header has {length} bytes")
    header = file.read(length)
    if len(header) < length:
        raise _refusal("it ends in its header")
    places = _places(header, size - 8 - length)
    digest = hashlib.sha256(first + header)
    tensors: dict[str, Tensor] = {}
    for name, place in places:
        dtype = TYPES[place.dtype]
        data = torch.empty(place.data_offsets[1] - place.data_offsets[0], dtype=torch.uint8)
        if file.readinto(data.numpy().data) != data.numel():
            raise _refusal(f"it ends in {shown(name)}")
        digest.update(data.numpy().data)
        tensors[name] = data.view(dtype).reshape(place.shape) if data.numel() else torch.empty(place.shape, dtype=dtype)
    return {name: tensors[name] for name in sorted(tensors)}, digest.hexdigest()


def _places(header: bytes, room: int) -> list[tuple[str, _Place]]:
    """The tensors in the order of the file, which fill the `room` behind the header, without gap or overlap."""
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        decoder = msgspec.json.Decoder(_Place)
        places = [(name, decoder.decode(place)) for name, place in raw.items()]
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise _refusal(shown(str(error))) from None
    places.sort(key=lambda item: item[1].data_offsets)
    end = 0
    for name, place in places:
        first, last = place.data_offsets
        dtype = TYPES.get(place.dtype)
        if dtype is None:
            raise _refusal(f"{shown(name)} is of type {shown(place.dtype)}")
        if first != end or last < first or last > room or math.prod(place.shape) * dtype.itemsize != last - first:
            raise _refusal(f"{shown(name)} of {place.dtype} {place.shape} lies at {first} to {last}, expected at {end}")
        if max(place.shape, default=0) > 1 << 40:
            raise _refusal(f"{shown(name)} has the shape {place.shape}")
        end = last
    if end != room:
        raise _refusal(f"its tensors have {end} bytes, the file {room}")
    return places


def _refusal(reason: str) -> CheckpointError:
    return CheckpointError(f"not a valid safetensors file ({reason}); copy the file again")
