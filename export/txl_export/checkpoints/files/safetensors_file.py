"""The files safetensors writes: a JSON header with places, then the tensors, without gaps.

The safetensors library maps a file into memory, and a file that somebody cuts short meanwhile ends the process. So the
tensors are copied out of the open file here, which is hashed on the way.
"""

from __future__ import annotations

import hashlib
import io

import msgspec
import torch
from torch import Tensor
from txl_runtime.bundle.weight_header import MOST_BYTES, decode_header, in_order
from txl_runtime.errors import CheckpointError

from txl_export.checkpoints.files.pickle_names import shown

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
WIDTHS = {name: dtype.itemsize for name, dtype in TYPES.items()}
MOST = 2**40
"""The largest size of an axis: torch multiplies the sizes of a tensor that is empty, too."""


def is_safetensors(head: bytes, size: int) -> bool:
    """Whether a file begins like safetensors: the header's length, then its JSON."""
    return len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8


def read_safetensors(file: io.BufferedReader, size: int) -> tuple[dict[str, Tensor], str]:
    """The tensors by name, and the file's SHA-256.

    Raises:
        CheckpointError: it is not valid, or has a type torch does not know.
    """
    file.seek(0)
    hashing = _Hashing(file)
    try:
        _, entries, start = decode_header(hashing, size, MOST_BYTES)
        ordered = in_order(entries, WIDTHS, size - start)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise _refusal(str(error)) from None
    tensors: dict[str, Tensor] = {}
    for name, place in ordered:
        if max(place.shape, default=0) > MOST:
            raise _refusal(f"{shown(name)} has the shape {list(place.shape)}")
        dtype = TYPES[place.dtype]
        data = torch.empty(place.data_offsets[1] - place.data_offsets[0], dtype=torch.uint8)
        if file.readinto(data.numpy().data) != data.numel():
            raise _refusal(f"it ends in {shown(name)}")
        hashing.digest.update(data.numpy().data)
        tensors[name] = data.view(dtype).reshape(place.shape) if data.numel() else torch.empty(place.shape, dtype=dtype)
    return {name: tensors[name] for name in sorted(tensors)}, hashing.digest.hexdigest()


class _Hashing:
    """Reads a file and hashes what it reads."""

    def __init__(self, file: io.BufferedReader) -> None:
        self.digest, self._file = hashlib.sha256(), file

    def read(self, size: int, /) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        return data


def _refusal(reason: str) -> CheckpointError:
    return CheckpointError(f"not a valid safetensors file ({reason}); copy the file again")
