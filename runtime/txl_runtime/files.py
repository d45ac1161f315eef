"""Plain files, opened without ever waiting, and locks that end with their process."""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

# Windows has only O_BINARY of these, and Unix only the others.
_READING = os.O_RDONLY | sum(getattr(os, flag, 0) for flag in ("O_BINARY", "O_NONBLOCK", "O_NOCTTY"))
_BEHIND = 2**30
"""Offset of the byte that is locked on Windows, 1 GiB: after the end of any smaller file, where a lock may lie, too."""


class NotPlainError(OSError):
    """A path leads to a folder, a pipe or a device instead of a plain file; `mode` is that of `os.stat`."""

    def __init__(self, mode: int) -> None:
        super().__init__(0, "Is a directory" if stat.S_ISDIR(mode) else "no plain file")

    def __str__(self) -> str:
        return str(self.strerror)


@contextmanager
def open_plain(path: Path | str, links: bool = True) -> Iterator[tuple[io.BufferedReader, os.stat_result]]:
    """Open a plain file for reading; yield it and its `os.stat_result`.

    Opening a pipe would wait for a writer, a device may have no end, and some devices act when they are opened. The
    check is repeated after opening, since the file may have been replaced in between.

    Args:
        links: whether the last part of the path may be a link.

    Raises:
        NotPlainError: the path leads to a folder, a pipe or a device.
        OSError: the file is missing, or cannot be opened.
    """
    if not stat.S_ISREG(mode := os.stat(path).st_mode):  # noqa: PTH116 - as of the descriptor below
        raise NotPlainError(mode)
    flags = _READING | (0 if links else getattr(os, "O_NOFOLLOW", 0))
    with open(path, "rb", opener=lambda place, _: os.open(place, flags)) as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise NotPlainError(facts.st_mode)
        yield file, facts


def lock(descriptor: int, wait: bool = False) -> bool:
    """Lock an open file until it is closed or its process ends; return False if it is already locked.

    Raises:
        OSError: its file system has no locks.
    """
    if sys.platform == "win32":
        place = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.lseek(descriptor, _BEHIND, os.SEEK_SET)  # Windows lets no other process read the locked byte
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
