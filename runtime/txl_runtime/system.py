"""Everything in which Windows differs for this package: flags of files, locks, renames, and names of NVIDIA's files.

Limits of a process and files in /proc exist only on Linux, so their code stands where it is used.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

BINARY, NO_LINK = getattr(os, "O_BINARY", 0), getattr(os, "O_NOFOLLOW", 0)
"""Flags of os.open. `BINARY`: read bytes unchanged, as Unix always does. `NO_LINK`: refuse a link as the last part of a
path, on Unix only.
"""
READING = os.O_RDONLY | BINARY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
"""Flags of os.open to read a plain file; opening a pipe or a terminal by mistake returns at once."""
RENAMES_OPEN = sys.platform != "win32"
"""True if a file may be renamed while it is open."""
CUDA_DRIVER = "libcuda.so.1" if sys.platform != "win32" else "nvcuda.dll"
"""File name of the library of CUDA's driver."""
CUDNN = "libcudnn.so.9" if sys.platform != "win32" else "cudnn64_9.dll"
"""File name of the cuDNN library."""
LIBRARIES = ("lib",) if sys.platform != "win32" else ("bin", "bin/*")
"""Folders that hold libraries in NVIDIA's pip packages."""
_BEHIND = 2**30
"""Offset of the byte that is locked on Windows, 1 GiB. Windows allows locks beyond the end of a file."""


def is_own(path: Path) -> bool:
    """Return True if a path is this user's, and nobody else may write to it; on Windows always return True.

    Raises:
        OSError: there is no such path.
    """
    info = path.lstat()
    return sys.platform == "win32" or (info.st_uid == os.getuid() and not info.st_mode & 0o022)


def lists_driver() -> bool:
    """Return True if Windows finds CUDA's driver; False on Unix, where device files show a GPU."""
    if sys.platform == "win32":
        from ctypes.util import find_library

        return find_library("nvcuda") is not None
    return False


def lock(descriptor: int, wait: bool = False) -> bool:
    """Lock an open file until it is closed or its process ends; return False if it is already locked.

    Raises:
        OSError: the file system has no locks.
    """
    if sys.platform == "win32":
        place = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.lseek(descriptor, _BEHIND, os.SEEK_SET)  # on Windows, other processes cannot read a locked byte
        try:
            msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        finally:
            os.lseek(descriptor, place, os.SEEK_SET)
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def remove_unlocked(path: str) -> None:
    """Remove a file, unless a running process has locked it; on Windows, unless a process has it open.

    Raises:
        OSError: the file cannot be opened or removed.
    """
    if sys.platform == "win32":
        os.unlink(path)  # noqa: PTH108 - as it comes from scandir
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if lock(descriptor):
            os.unlink(path)  # noqa: PTH108
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk; on Windows and some file systems this cannot be requested.

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
