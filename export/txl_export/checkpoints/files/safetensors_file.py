"""Reads safetensors files: a JSON header with offsets, then the tensors, without gaps.

The tensors are copied. The safetensors library would map the file into memory, and a mapped file that is cut short ends
the process.
"""

from __future__ import annotations

import io
import math

import msgspec
import torch
from torch import Tensor
from txl_runtime.bundle.weight_header import MOST_BYTES, decode_header, in_order
from txl_runtime.errors import CheckpointError

from txl_export.checkpoints.files.pickle_names import shown
from txl_export.checkpoints.files.rebuilding import LONGEST

_NAMES = "BOOL bool U8 uint8 I8 int8 U16 uint16 I16 int16 U32 uint32 I32 int32 U64 uint64 I64 int64 F16 float16"
_NAMES += " BF16 bfloat16 F32 float32 F64 float64 F8_E4M3 float8_e4m3fn F8_E5M2 float8_e5m2 C64 complex64"
TYPES = {name: getattr(torch, dtype) for name, dtype in zip(_NAMES.split()[::2], _NAMES.split()[1::2], strict=True)}
WIDTHS = {name: dtype.itemsize for name, dtype in TYPES.items()}


def is_safetensors(head: bytes, size: int) -> bool:
    """Return whether a file begins like safetensors: the header's length in 8 bytes, then "{"."""
    return len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8


def read_safetensors(file: io.BufferedReader, size: int) -> dict[str, Tensor]:
    """Return the tensors of a file by name.

    For example, {"word_emb.weight": a tensor [256, 32]}.

    Raises:
        CheckpointError: the file is not valid, or has a type that is not in `TYPES`.
    """
    file.seek(0)
    try:
        _, entries, start = decode_header(file, size, MOST_BYTES)
        ordered = in_order(entries, WIDTHS, size - start)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise _refusal(str(error)) from None
    tensors: dict[str, Tensor] = {}
    for name, place in ordered:
        if math.prod(n or 1 for n in place.shape) > LONGEST:
            raise _refusal(f"{shown(name)} has the shape {list(place.shape)}")
        dtype = TYPES[place.dtype]
        data = torch.empty(place.data_offsets[1] - place.data_offsets[0], dtype=torch.uint8)
        if file.readinto(data.numpy().data) != data.numel():
            raise _refusal(f"it ends in {shown(name)}")
        tensors[name] = data.view(dtype).reshape(place.shape) if data.numel() else torch.empty(place.shape, dtype=dtype)
    return {name: tensors[name] for name in sorted(tensors)}


def _refusal(reason: str) -> CheckpointError:
    return CheckpointError(f"not a valid safetensors file ({reason}); copy the file again")
