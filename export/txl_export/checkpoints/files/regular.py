"""Regular files, and nothing else: a pipe would wait for a writer, a device may have no end."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from txl_runtime.errors import CheckpointError

_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_BINARY", "O_CLOEXEC", "O_NONBLOCK"))
"""Not to block: what is a file when it is looked at may be a pipe when it is opened."""


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[io.BufferedReader, int]]:
    """A file, open for reading, and its size; for as long as it is read, nobody may write to it.

    Raises:
        CheckpointError: it is no regular file, or was written to in the meantime; the path is not in the message.
        OSError: it cannot be opened or read.
    """
    if not stat.S_ISREG(path.stat().st_mode):  # some devices act when they are opened
        raise CheckpointError("not a regular file, expected one; copy it to a file first")
    with os.fdopen(os.open(path, _FLAGS), "rb") as file:
        before = os.fstat(file.fileno())
        if not stat.S_ISREG(before.st_mode):
            raise CheckpointError("not a regular file, expected one; copy it to a file first")
        yield file, before.st_size
        after = os.fstat(file.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise CheckpointError("was written to while it was read, expected a finished file; try again")


def read_regular(path: Path, limit: int) -> bytes:
    """All bytes of a file.

    Raises:
        CheckpointError: it is no regular file, or larger than `limit`; the path is not in the message.
        OSError: it cannot be opened or read.
    """
    with open_regular(path) as (file, size):
        if size > limit:
            raise CheckpointError(f"has {size} bytes, expected at most {limit}; check the path")
        return file.read(size)
