"""Decoders of a bundle's stored vectors, its report, and tensors of its weight file.

Most models load and stream without these files. A file may be hostile: decoding takes memory of at most a fixed
multiple of the file's size.
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
"""Maximum size of unpacked vectors: 64 times their file or 64 MiB, whichever is larger. Zeros pack well, so even a
small file may unpack to 64 MiB.
"""


def decode_vectors(data: bytes, source: str) -> dict[str, NDArray[Any]]:
    """Return arrays by name, e.g. {"length": [steps]}, from a safetensors file, or an .npz file as in bundle format
    2.0.

    With three steps, "length" is e.g. [4, 4, 1].

    Args:
        source: the file's path; a file whose path ends in .npz is read as .npz.

    Raises:
        BundleError: the file is neither safetensors nor .npz, holds values that are no plain numbers, or is larger
            unpacked than `EXPANDED` and `SMALL` allow.
    """
    try:
        return _unpacked(data) if source.endswith(".npz") else read_whole(io.BytesIO(data), *(len(data),) * 2)[1]
    except Exception as error:  # numpy, zipfile and zlib each raise errors of their own
        reason = one_line(error) or type(error).__name__
        raise BundleError(f"{source}: {reason}; expected stored vectors; export the model again") from None


def _unpacked(data: bytes) -> dict[str, NDArray[Any]]:
    """Return the arrays of an .npz file.

    Raises:
        ValueError, or errors of zipfile and zlib: see `decode_vectors`.
    """
    allowed = max(SMALL, EXPANDED * len(data))
    with zipfile.ZipFile(io.BytesIO(data)) as stored:
        members = stored.infolist()
        if (size := sum(member.file_size for member in members)) > allowed:
            raise ValueError(f"{size} bytes when expanded, expected at most {allowed}")
        return {member.filename.removesuffix(".npy"): _array(stored, member) for member in members}


def _array(stored: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    """Return one array. Its header must declare exactly the bytes that follow, so that it cannot claim more memory."""
    # data that bzip2 or LZMA packed may expand without a limit
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{member.filename} is compressed in way {member.compress_type}")
    content = io.BytesIO(stored.read(member))
    if np.lib.format.read_magic(content) != (1, 0):  # later versions have longer headers, for records with named fields
        raise ValueError(f"{member.filename} is no plain array")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(content)
    values = content.getbuffer()[content.tell() :]
    if dtype.kind not in "biuf" or math.prod(shape) * dtype.itemsize != len(values):
        raise ValueError(f"{member.filename} declares {dtype} {list(shape)} and holds {len(values)} bytes")
    return np.frombuffer(values, dtype).reshape(shape, order="F" if fortran else "C")


def decode_report(data: bytes, source: str) -> dict[str, Any]:
    """Return the verification report as a dict; {} if it is JSON of a different kind.

    Raises:
        BundleError: the bytes are not JSON.
    """
    try:
        report = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{source}: {one_line(error)}; expected a report; export the model again") from None
    return report if isinstance(report, dict) else {}


def read_tensors(path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return tensors of a safetensors file by name, e.g. {"embedding": [V, D]}.

    For example, `read_tensors(path, ["embedding"])["embedding"]` is [256, 32].

    Raises:
        BundleError: the file is not safetensors, lacks a name, or NumPy lacks the type of a tensor (bfloat16).
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as tensors:
            return {name: tensors.get_tensor(name) for name in names}
    except (SafetensorError, OSError, TypeError, AttributeError, KeyError, ValueError) as error:
        raise BundleError(f"{path}: {one_line(error)}; expected the bundle's weights; export the model again") from None
