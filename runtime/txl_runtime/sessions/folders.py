"""A folder that one process alone writes to: its lock, and private files in it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from txl_runtime.errors import TxlError, UsageError
from txl_runtime.files import NotPlainError, lock, open_plain

LOCK = "sessions.lock"
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
"""Rights of what is made here: a session's memory tells what was fed to it."""


class Lock:
    """A lock on a folder, which ends with its process whatever ends that; the file it is held on stays there, empty.

    Args:
        folder: that is to be this process's; it is made where there is none.

    Raises:
        UsageError: another process, or another owner in this process, has the folder.
        TxlError: the folder cannot be made or written to.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
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
        """Let others have the folder; calling it again does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # it is closed whatever is said of it
                os.close(descriptor)


def write_private(path: Path, data: bytes) -> None:
    """Write a new file that nobody else may read; return when the disk holds it.

    Args:
        path: where nothing is yet.

    Raises:
        OSError: it cannot be written; nothing is left of it, as far as it can be removed.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
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
    """Read a file that has so many bytes.

    Raises:
        OSError: it is not there, or cannot be read.
        ValueError: it has another size, or is no file; what is said continues a sentence about it.
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
    """Remove a file, if it is there and can be removed."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def unwritable(place: Path, error: OSError) -> TxlError:
    """What to say where a folder or a file cannot be written."""
    said = error.strerror or type(error).__name__
    return TxlError(
        f"{place}: cannot be written ({said}), expected a folder with room and rights; choose another place"
    )
