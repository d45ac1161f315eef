"""A function that opens plain files, without ever waiting, and its error."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from txl_runtime.system import NO_LINK, READING


class NotPlainError(OSError):
    """A path leads to a folder, a pipe or a device instead of a plain file; `mode` is the file mode from `os.stat`."""

    def __init__(self, mode: int) -> None:
        super().__init__(0, "Is a directory" if stat.S_ISDIR(mode) else "no plain file")

    def __str__(self) -> str:
        return str(self.strerror)


@contextmanager
def open_plain(path: Path | str, links: bool = True) -> Iterator[tuple[io.BufferedReader, os.stat_result]]:
    """Open a plain file for reading; yield the file and its `os.stat_result`.

    Opening a pipe would wait for a writer, a device may have no end, and some devices act when they are opened. The
    check is repeated after opening, because the file may have been replaced in between.

    Args:
        links: whether the last part of the path may be a symbolic link.

    Raises:
        NotPlainError: the path leads to a folder, a pipe or a device.
        OSError: the file is missing, or cannot be opened.
    """
    if not stat.S_ISREG(mode := os.stat(path).st_mode):  # noqa: PTH116 - as of the descriptor below
        raise NotPlainError(mode)
    flags = READING | (0 if links else NO_LINK)
    with open(path, "rb", opener=lambda place, _: os.open(place, flags)) as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise NotPlainError(facts.st_mode)
        yield file, facts
