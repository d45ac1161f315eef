"""Reads regular files only: a pipe would wait for a writer, and a device may never end."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from txl_runtime.errors import CheckpointError
from txl_runtime.files import NotPlainError, open_plain


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[io.BufferedReader, int]]:
    """Open a file and yield it with its size in bytes; after the block, refuse a file that was written to meanwhile.

    Raises:
        CheckpointError: the file is not regular, or was written to; the message does not name the path.
        OSError: the file cannot be opened or read.
    """
    try:
        with open_plain(path) as (file, before):
            yield file, before.st_size
            after = os.fstat(file.fileno())
    except NotPlainError:
        raise CheckpointError("not a regular file, expected one; copy it to a file first") from None
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise CheckpointError("was written to while it was read, expected a finished file; try again")


def read_regular(path: Path, limit: int) -> bytes:
    """Return all bytes of a file.

    Raises:
        CheckpointError: the file is not regular, or larger than `limit` bytes; the message does not name the path.
        OSError: the file cannot be opened or read.
    """
    with open_regular(path) as (file, size):
        if size > limit:
            raise CheckpointError(f"has {size} bytes, expected at most {limit}; check the path")
        return file.read(size)
