"""Files of the system: plain ones, opened so that nothing is waited for, and locks that end with their process."""

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

# Windows has the first of them alone.
_READING = os.O_RDONLY | sum(getattr(os, flag, 0) for flag in ("O_BINARY", "O_NONBLOCK", "O_NOCTTY"))
_BEHIND = 2**30
"""Windows locks bytes. This one lies behind the end of a file of less than a gibibyte; a lock may lie there, too."""


class NotPlainError(OSError):
    """What stands at a path is no plain file, but a folder, a pipe or a device; `mode` is that of `os.stat`."""

    def __init__(self, mode: int) -> None:
        super().__init__(0, "Is a directory" if stat.S_ISDIR(mode) else "no plain file")

    def __str__(self) -> str:
        return str(self.strerror)


@contextmanager
def open_plain(path: Path | str, links: bool = True) -> Iterator[tuple[io.BufferedReader, os.stat_result]]:
    """A plain file, open for reading, and what the system knows of it.

    A pipe would wait for a writer, a device may have no end, and some act as soon as they are opened. What is a file
    when it is looked at may be a pipe when it is opened.

    Args:
        links: whether the last part of the path may be a link.

    Raises:
        NotPlainError: it is something else.
        OSError: there is none, or it cannot be opened.
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
    """Lock an open file, until it is closed or its process ends; False where somebody else has locked it.

    Raises:
        OSError: its file system has no locks.
    """
    if sys.platform == "win32":
        place = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.lseek(descriptor, _BEHIND, os.SEEK_SET)  # nobody else can read the byte that is locked
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
