"""A saved state, read whole: every size is checked before memory is taken, and no file stays mapped.

A mapped file that somebody cuts short kills the process. What is read here is at most the file and a header of 1 MiB.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from txl_runtime.bundle.weight_header import decode_header, in_order
from txl_runtime.errors import UsageError, brief
from txl_runtime.files import open_plain
from txl_runtime.types import Array

ADVICE = "expected a saved state; StreamState.save writes one"
HEADER = 2**20
"""Bytes of the header at most: ten thousand tensors."""
TYPES = {
    "BOOL": "?",
    **{f"{name}{8 * size}": f"<{kind}{size}" for name, kind in (("I", "i"), ("U", "u")) for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": f"<f{size}" for size in (2, 4, 8)},
}
"""NumPy's types by safetensors' names; it has none for BF16 and smaller floats, which no state is kept in."""
WIDTHS = {name: np.dtype(kind).itemsize for name, kind in TYPES.items()}


def tensors_of(data: bytes, source: str) -> tuple[dict[str, str], dict[str, Array]]:
    """The metadata and the tensors, copies, of the bytes of a safetensors file.

    Raises:
        UsageError: they are damaged; the message begins with `source`.
    """
    with _explained(source):
        return _read(io.BytesIO(data), len(data))


def read_tensors(source: Path) -> tuple[dict[str, str], dict[str, Array]]:
    """The metadata and the tensors of a safetensors file.

    Raises:
        UsageError: there is no such file, or it is another kind of file, or it is damaged.
    """
    with _explained(str(source)), open_plain(source) as (file, known):
        return _read(file, known.st_size)


@contextlib.contextmanager
def _explained(source: str) -> Iterator[None]:
    """What is wrong with a file, as the error of a user."""
    try:
        yield
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        said = getattr(error, "strerror", None) or error  # an OSError's own text names the file again
        raise UsageError(f"{source}: {said}; {ADVICE}") from None


def _read(file: io.BufferedReader | io.BytesIO, size: int) -> tuple[dict[str, str], dict[str, Array]]:
    """The same of an open file of so many bytes; a ValueError says what is wrong with it."""
    facts, entries, start = decode_header(file, size, HEADER)
    tensors: dict[str, Array] = {}
    for name, entry in in_order(entries, WIDTHS, size - start):
        tensors[name] = np.empty(entry.shape, TYPES[entry.dtype])
        raw = tensors[name].reshape(-1).view(np.uint8)
        if file.readinto(raw.data) != raw.size:
            raise ValueError("it became shorter while it was read")
        if entry.dtype == "BOOL" and raw.max(initial=0) > 1:
            raise ValueError(f"{brief(name)} is BOOL and holds {raw.max()}")
    return facts, tensors
