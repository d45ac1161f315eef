"""A reader of saved states; it reads all tensors with limited memory (`bundle.tensor_file`) and explains
damaged files.
"""

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
"""Ending of every error message about a file that holds no saved state."""
HEADER = 2**20
"""Maximum size of the file's header, 1 MiB: enough for about ten thousand tensors."""


def tensors_of(data: bytes, source: str) -> tuple[dict[str, str], dict[str, Array]]:
    """Return the metadata, and copies of the tensors, from the bytes of a safetensors file.

    For example, ({"model_id": "9f2c…"}, {"fill": [2]}) of a state of two sequences.

    Raises:
        UsageError: the bytes are damaged; the message begins with `source`.
    """
    with _explained(source):
        return read_whole(io.BytesIO(data), len(data), HEADER)


def read_tensors(source: Path) -> tuple[dict[str, str], dict[str, Array]]:
    """Return the metadata and the tensors of a safetensors file.

    For example, ({"model_id": "9f2c…"}, {"fill": [2]}) of a state of two sequences.

    Raises:
        UsageError: the file is missing, damaged, or of a different kind.
    """
    with _explained(str(source)), open_plain(source) as (file, known):
        return read_whole(file, known.st_size, HEADER)


@contextlib.contextmanager
def _explained(source: str) -> Iterator[None]:
    """Turn any error while reading a file into a UsageError that names the file."""
    try:
        yield
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        reason = getattr(error, "strerror", None) or error  # str(OSError) would name the file twice
        raise UsageError(f"{source}: {reason}; {ADVICE}") from None
