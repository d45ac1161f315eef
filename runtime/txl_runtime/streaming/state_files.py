"""A saved state, read whole and bounded (`bundle.tensor_file`), and what is said to the user of one that is damaged."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import msgspec

from txl_runtime.bundle.tensor_file import read_whole
from txl_runtime.errors import UsageError
from txl_runtime.files import open_plain
from txl_runtime.types import Array

ADVICE = "expected a saved state; StreamState.save writes one"
HEADER = 2**20
"""Bytes of the header at most: ten thousand tensors."""


def tensors_of(data: bytes, source: str) -> tuple[dict[str, str], dict[str, Array]]:
    """The metadata and the tensors, copies, of the bytes of a safetensors file.

    Raises:
        UsageError: they are damaged; the message begins with `source`.
    """
    with _explained(source):
        return read_whole(io.BytesIO(data), len(data), HEADER)


def read_tensors(source: Path) -> tuple[dict[str, str], dict[str, Array]]:
    """The metadata and the tensors of a safetensors file.

    Raises:
        UsageError: there is no such file, or it is another kind of file, or it is damaged.
    """
    with _explained(str(source)), open_plain(source) as (file, known):
        return read_whole(file, known.st_size, HEADER)


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
