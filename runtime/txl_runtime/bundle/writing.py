"""Files that a power cut finds whole: written through to the disk, named in one step, their folder written through too.

A name is an entry of its folder, and a disk may keep files and folders in any order. So a file is synchronised before
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
"""In hidden names beside a name: of what is not finished."""


def write_file(path: Path, data: bytes | memoryview) -> None:
    """Write bytes, and return when the disk holds them.

    Raises:
        OSError: it cannot be written; a part of it may be there.
    """
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Return when the disk holds the names in a folder; Windows and some file systems have no way to ask for it.

    Raises:
        OSError: the disk could not write them.
    """
    if sys.platform == "win32":
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # it may be written to and not be read
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
"""What may stand where a file is to be written, beside files and devices."""


def plain_place(path: Path) -> Path:
    """Where a file that somebody named is to be written: at the end of links, over a plain file or nothing.

    `write_whole` gives the name to another file: a link would become a file and what it leads to stay old, and
    `/dev/full` would become a file as well.

    Raises:
        UsageError: something else than a plain file stands there.
        OSError: it cannot be looked at.
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
    """Write a file that somebody named, as `write_whole` does, at the end of links.

    Raises:
        UsageError: something else than a plain file stands there.
        TxlError: it cannot be written. The file is the old one or the new one, and nothing else is left there.
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
    except OSError as error:  # its text names the hidden file
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TxlError(f"{path}: cannot be written, the disk is full; make room or choose another place") from None
        said = error.strerror or type(error).__name__
        raise TxlError(
            f"{path}: cannot be written ({said}), expected a folder with room and rights; choose another place"
        ) from None


def write_whole(path: Path, data: bytes | memoryview, mode: int = 0o666) -> None:
    """Write a file that is there as a whole or not at all, whoever else reads or writes it at the same time.

    What stood there before is replaced in one step, whatever it was; see `plain_place`. When this returns, the file
    survives a loss of power. What killed writers of the same file have left is removed. `mode` are the rights of a
    new file, less those that the process's mask takes.

    Raises:
        OSError: the place cannot be written to. The file is the old one or the new one, and nothing else is left there.
    """
    _clean(path)
    while not _replaced(path, data, mode):
        pass  # another writer took the unfinished file for a dead one's, before it could be locked
    sync_folder(path.parent)


def _replaced(path: Path, data: bytes | memoryview, mode: int) -> bool:
    """Write a file beside its place and rename it; False where somebody removed it in between."""
    partial = path.with_name(f".{path.name}{PARTIAL}{secrets.token_hex(6)}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        with open(os.open(partial, flags, mode), "wb") as stream:  # noqa: PTH123 - a descriptor
            with contextlib.suppress(OSError):  # no locks there: nobody cleans up either
                lock(stream.fileno(), wait=True)
            if not partial.exists():
                return False
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
            if sys.platform != "win32":  # while the lock is held; Windows renames no file that is open
                partial.replace(path)
        if sys.platform == "win32":
            partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return True


def _clean(path: Path) -> None:
    """Remove what killed writers of a file have left. A living one holds a lock, on Windows it holds the file open."""
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
