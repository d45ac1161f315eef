"""A folder that only one process writes to: the folder's lock, and files in it that only their owner can read."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from txl_runtime.errors import TxlError, UsageError
from txl_runtime.files import NotPlainError, open_plain
from txl_runtime.system import BINARY, NO_LINK, lock

LOCK = "sessions.lock"
"""Name of the empty file that a process locks to have the folder for itself."""
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
"""Permissions of new files and folders: access only for their owner, because a session's memory reveals its texts."""


class Lock:
    """A lock on an empty file in a folder. The system releases it when the process ends, even if it is killed.

    Args:
        folder: path of the folder, which is made if it does not exist.

    Raises:
        UsageError: a second process, or a second owner in this process, holds the lock.
        TxlError: the folder cannot be made or written to.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | NO_LINK
            descriptor = os.open(folder / LOCK, flags, PRIVATE_FILE)
        except OSError as error:
            raise unwritable(folder, error) from None
        try:
            free = lock(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise TxlError(
                f"{folder}: cannot be locked ({error.strerror}), expected a file system that knows locks; choose "
                "another folder"
            ) from None
        if not free:
            os.close(descriptor)
            raise UsageError(
                f"{folder}: another server uses it, expected a folder for this one alone; end that server, or choose "
                "another folder"
            )
        self._descriptor = descriptor

    def release(self) -> None:
        """Unlock the folder; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # the descriptor is released even if close reports an error
                os.close(descriptor)


def write_private(path: Path, data: bytes) -> None:
    """Write a new file that only its owner may read; return when it is on the disk.

    Args:
        path: path of the file, which must not exist.

    Raises:
        OSError: the file cannot be written; a partly written file was removed, if possible.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY
    with open(os.open(path, flags, PRIVATE_FILE), "wb", buffering=0) as stream:  # noqa: PTH123 - a descriptor
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[stream.write(rest) :]
            os.fsync(stream.fileno())
        except BaseException:
            remove(path)
            raise


def read_private(path: Path, size: int) -> bytes:
    """Return the content of a file that has exactly `size` bytes.

    Raises:
        OSError: the file is missing, or cannot be read.
        ValueError: the size differs, or the path is no plain file; the message has no subject, e.g. "is no plain file".
    """
    try:
        with open_plain(path, links=False) as (stream, known):
            if known.st_size != size:
                raise ValueError(f"has {known.st_size} bytes, expected {size}")
            data = stream.read(size)
    except NotPlainError:
        raise ValueError("is no plain file") from None
    if len(data) != size:
        raise ValueError("became shorter while it was read")
    return data


def remove(path: Path) -> None:
    """Remove a file; do nothing if it is missing or cannot be removed."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def unwritable(place: Path, error: OSError) -> TxlError:
    """Return the error for a folder or a file that cannot be written."""
    reason = error.strerror or type(error).__name__
    return TxlError(
        f"{place}: cannot be written ({reason}), expected a folder with room and rights; choose another place"
    )
