"""Writers of files that survive a power cut whole: fsync the file, rename it in one step, fsync its folder.

A name is an entry of its folder, and a disk may write files and folders in any order. So a file is synchronised before
it gets its name, and its folder after that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
from pathlib import Path

from txl_runtime.errors import TxlError, UsageError
from txl_runtime.files import lock

PARTIAL = ".partial-"
"""Part of a hidden name such as `.report.json.partial-1a2b`: a file that is being written."""


def write_file(path: Path, data: bytes | memoryview) -> None:
    """Write bytes, and return when the disk holds them.

    Raises:
        OSError: the file cannot be written; a part of it may be there.
    """
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Return when the disk holds the names in a folder; Windows and some file systems have no way to ask for it.

    Raises:
        OSError: the disk could not write the names.
    """
    if sys.platform == "win32":
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a folder with write but no read permission cannot be opened
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
"""Names for messages, by type of file; plain files and devices are not among them."""


def plain_place(path: Path) -> Path:
    """Return the real path, with links followed, of a file that a user named; a plain file or nothing has to be there.

    `write_whole` renames a new file to the path: it would replace a link by a file and leave the link's target old,
    and would replace a device such as `/dev/full` by a file.

    Raises:
        UsageError: a folder, a device, a pipe or a socket stands there.
        OSError: the path cannot be looked up.
    """
    try:
        found = stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:  # nothing yet, or a link to nothing yet
        return Path(os.path.realpath(path))
    if found != stat.S_IFREG:
        kind = KINDS.get(found, "a device")
        raise UsageError(f"{path}: found {kind}, expected a plain file or nothing; choose another place")
    return Path(os.path.realpath(path, strict=True))


def write_named(path: Path, data: bytes | memoryview) -> None:
    """Write a file that a user named, as `write_whole` does, after following links.

    Raises:
        UsageError: a folder, a device, a pipe or a socket stands there.
        TxlError: the file cannot be written. It is the old one or the new one, and no partial file is left.
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
    except OSError as error:  # its own text would name the hidden partial file
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TxlError(f"{path}: cannot be written, the disk is full; make room or choose another place") from None
        said = error.strerror or type(error).__name__
        raise TxlError(
            f"{path}: cannot be written ({said}), expected a folder with room and rights; choose another place"
        ) from None


def write_whole(path: Path, data: bytes | memoryview, mode: int = 0o666) -> None:
    """Write a file in one step: readers and other writers find the old file or the new one, never a part.

    Anything but a folder at the path is replaced, links and devices too; see `plain_place`. When this returns, the file
    survives a power cut. It also removes partial files of writers that were killed. `mode` is the file's permissions,
    before the process's umask.

    Raises:
        OSError: the file cannot be written. It is the old one or the new one, and no partial file is left.
    """
    _clean(path)
    while not _replaced(path, data, mode):
        pass  # when two write at once, one may remove the other's partial file before that is locked
    sync_folder(path.parent)


def _replaced(path: Path, data: bytes | memoryview, mode: int) -> bool:
    """Write a file under a hidden name and rename it; return False if another writer removed it in between."""
    partial = path.with_name(f".{path.name}{PARTIAL}{secrets.token_hex(6)}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        with open(os.open(partial, flags, mode), "wb") as stream:  # noqa: PTH123 - a descriptor
            with contextlib.suppress(OSError):  # on a file system without locks `_clean` removes no file either
                lock(stream.fileno(), wait=True)
            if not partial.exists():
                return False
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
            if sys.platform != "win32":  # rename while the lock is held; Windows cannot rename an open file
                partial.replace(path)
        if sys.platform == "win32":
            partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return True


def _clean(path: Path) -> None:
    """Remove partial files of killed writers. A living writer holds a lock; on Windows it holds the file open."""
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if entry.name.startswith(f".{path.name}{PARTIAL}"):
                with contextlib.suppress(OSError):
                    _remove_dead(entry.path)


def _remove_dead(partial: str) -> None:
    if sys.platform == "win32":
        os.unlink(partial)  # noqa: PTH108 - as it comes from scandir
        return
    descriptor = os.open(partial, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if lock(descriptor):
            os.unlink(partial)  # noqa: PTH108
    finally:
        os.close(descriptor)
