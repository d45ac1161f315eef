"""Writers of files that survive a power cut: fsync the file, rename it in one step, fsync its folder.

A name is an entry of its folder, and a disk may write files and folders in any order. So a file is synchronised before
it gets its final name, and its folder afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from txl_runtime.errors import TxlError, UsageError
from txl_runtime.system import BINARY, RENAMES_OPEN, lock, remove_unlocked, sync_folder

PARTIAL = ".partial-"
"""Part of the hidden name of a file that is being written, e.g. `.report.json.partial-1a2b`."""


def write_file(path: Path, data: bytes | memoryview) -> None:
    """Write bytes, and return when they are on the disk.

    Raises:
        OSError: the file cannot be written; a part of it may be left.
    """
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
"""Names for messages, by type of file; plain files and devices are not listed."""


def plain_place(path: Path) -> Path:
    """Return the real path, with links followed, of a file that a user wants to write: a plain file, or nothing yet.

    `write_whole` renames a new file to the path. At a link, this would replace the link by a file and leave the link's
    target unchanged; a device such as `/dev/full` would become a file.

    Raises:
        UsageError: the path is a folder, a device, a pipe or a socket.
        OSError: the path cannot be looked up.
    """
    try:
        file_type = stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:  # the file, or the target of a link, does not exist yet
        return Path(os.path.realpath(path))
    if file_type != stat.S_IFREG:
        kind = KINDS.get(file_type, "a device")
        raise UsageError(f"{path}: found {kind}, expected a plain file or nothing; choose another place")
    return Path(os.path.realpath(path, strict=True))


def write_named(path: Path, data: bytes | memoryview) -> None:
    """Write a file at a path that a user chose, as `write_whole` does, after following links.

    Raises:
        UsageError: the path is a folder, a device, a pipe or a socket.
        TxlError: the file cannot be written. The path holds the old file or the new one, and no partial file is left.
    """
    try:
        place = plain_place(path)
        try:
            write_whole(place, data)
        except FileNotFoundError:
            if place.parent.exists():
                raise
            raise TxlError(
                f"{path}: cannot be written, there is no folder {place.parent}; make it or choose another place"
            ) from None
    except OSError as error:  # the error's own text would name the hidden partial file
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TxlError(f"{path}: cannot be written, the disk is full; make room or choose another place") from None
        reason = error.strerror or type(error).__name__
        raise TxlError(
            f"{path}: cannot be written ({reason}), expected a folder with room and rights; choose another place"
        ) from None


def write_whole(path: Path, data: bytes | memoryview, mode: int = 0o666) -> None:
    """Write a file in one step: readers and other writers find the old file or the new one, never a part.

    Whatever is at the path is replaced, except a folder: links and devices too; see `plain_place`. When this returns,
    the file survives a power cut. Partial files of writers that were killed are removed first. `mode` is the file's
    permissions before the process's umask.

    Raises:
        OSError: the file cannot be written. The path holds the old file or the new one, and no partial file is left.
    """
    _clean(path)
    while not _replaced(path, data, mode):
        pass  # a second writer may have removed the partial file before it was locked
    sync_folder(path.parent)


def _replaced(path: Path, data: bytes | memoryview, mode: int) -> bool:
    """Write a file under a hidden name and rename it; return False if a second writer removed it before the lock."""
    partial = path.with_name(f".{path.name}{PARTIAL}{secrets.token_hex(6)}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY
        with open(os.open(partial, flags, mode), "wb") as stream:  # noqa: PTH123 - a descriptor
            with contextlib.suppress(OSError):  # on a file system without locks, `_clean` removes no file
                lock(stream.fileno(), wait=True)
            if not partial.exists():
                return False
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
            if RENAMES_OPEN:  # on this system, rename while the lock is held
                partial.replace(path)
        if not RENAMES_OPEN:
            partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return True


def _clean(path: Path) -> None:
    """Remove partial files of killed writers. A running writer holds a lock; on Windows it holds the file open."""
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if entry.name.startswith(f".{path.name}{PARTIAL}"):
                with contextlib.suppress(OSError):
                    remove_unlocked(entry.path)
