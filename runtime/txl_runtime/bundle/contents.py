"""What some files of a bundle hold: stored vectors, the report, tensors of the weight file.

Nothing here is needed to load and stream most models. All of it may be damaged on purpose: what is read takes at most a
stated multiple of the file's size.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from txl_runtime.bundle.tensor_file import read_whole
from txl_runtime.errors import BundleError, one_line

EXPANDED, SMALL = 64, 1 << 26
"""Packed vectors have at most so many times the size of their file, or so many bytes: inputs may be zeros alone."""


def decode_vectors(data: bytes, source: str) -> dict[str, NDArray[Any]]:
    """Arrays by name from a safetensors file, or from an .npz file, as bundles of format 2.0 have it.

    Args:
        source: its path; the ending says which of the two it is.

    Raises:
        BundleError: it is no such file, holds something else than plain numbers, or more than `EXPANDED` allows.
    """
    try:
        return _unpacked(data) if source.endswith(".npz") else read_whole(io.BytesIO(data), *(len(data),) * 2)[1]
    except Exception as error:  # numpy, zipfile and zlib each raise their own kinds
        said = one_line(error) or type(error).__name__
        raise BundleError(f"{source}: {said}; expected stored vectors; export the model again") from None


def _unpacked(data: bytes) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file.

    Raises:
        ValueError, or what zipfile and zlib raise: see `decode_vectors`.
    """
    allowed = max(SMALL, EXPANDED * len(data))
    with zipfile.ZipFile(io.BytesIO(data)) as stored:
        members = stored.infolist()
        if (size := sum(member.file_size for member in members)) > allowed:
            raise ValueError(f"{size} bytes when expanded, expected at most {allowed}")
        return {member.filename.removesuffix(".npy"): _array(stored, member) for member in members}


def _array(stored: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    """One array, of exactly the bytes that its header declares: nothing is allocated that is not there."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others expand without a bound
        raise ValueError(f"{member.filename} is compressed in way {member.compress_type}")
    content = io.BytesIO(stored.read(member))
    if np.lib.format.read_magic(content) != (1, 0):  # later versions have longer headers, for names of fields
        raise ValueError(f"{member.filename} is no plain array")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(content)
    values = content.getbuffer()[content.tell() :]
    if dtype.kind not in "biuf" or math.prod(shape) * dtype.itemsize != len(values):
        raise ValueError(f"{member.filename} declares {dtype} {list(shape)} and holds {len(values)} bytes")
    return np.frombuffer(values, dtype).reshape(shape, order="F" if fortran else "C")


def decode_report(data: bytes, source: str) -> dict[str, Any]:
    """The verification report.

    Raises:
        BundleError: it is no JSON.
    """
    try:
        found = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{source}: {one_line(error)}; expected a report; export the model again") from None
    return found if isinstance(found, dict) else {}


def read_tensors(path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Tensors of a safetensors file by name.

    Raises:
        BundleError: the file is not safetensors, lacks a name, or holds what NumPy has no type for.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as tensors:
            return {name: tensors.get_tensor(name) for name in names}
    except (SafetensorError, OSError, TypeError, AttributeError, KeyError, ValueError) as error:
        raise BundleError(f"{path}: {one_line(error)}; expected the bundle's weights; export the model again") from None
