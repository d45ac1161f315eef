"""The folder of a bundle, which opens only plain files inside it, and notices when a file was replaced.

An engine opens some files by path, so a matching hash does not prove that the engine read the hashed bytes. The folder
therefore records each file's identity from the descriptor that it read, and compares it again when everything is open.
It records and compares the folder's own identity, too: `export --force` exchanges two folders, perhaps there and back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from txl_runtime.errors import BundleError, TxlError
from txl_runtime.files import open_plain

Identity = tuple[int, int, int, int, int]
"""Device, inode, size in bytes, and times of the last write and last change in nanoseconds."""
Made = TypeVar("Made")


class Folder:
    """A folder that opens its files and records the identity of each file.

    Attributes:
        path: the path as given, for messages.
        place: the real path when the folder was opened: a link in `path` that is changed later has no effect.

    Raises:
        OSError: there is no folder at the path.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, Path(os.path.realpath(path))
        self._seen: dict[str, Identity | None] = {}
        self._before = _identity(self.place.stat())

    @contextmanager
    def open(self, name: str) -> Iterator[tuple[BinaryIO, bool]]:
        """Open a plain file for reading; yield (file, True if the file was not replaced since it was first opened).

        Raises:
            OSError: the file cannot be opened, is no plain file, or a link leads out of the folder.
        """
        self._seen.setdefault(name, None)
        real = os.path.realpath(self.place / name)
        if not Path(real).is_relative_to(self.place):
            raise OSError(0, "a link that leaves the bundle")
        with open_plain(real, links=False) as (file, _):
            if self._seen[name] is None:
                self._seen[name] = _identity(os.fstat(file.fileno()))
            yield file, self._seen[name] == _identity(os.fstat(file.fileno()))

    def holds(self, name: str) -> bool:
        """Return whether the file was not replaced since it was first opened under this name."""
        try:
            with self.open(name) as (_, same):
                return same
        except OSError:
            return False

    @property
    def replaced(self) -> bool:
        """True if the folder, or a file that was opened in it, has been replaced or changed."""
        with suppress(OSError):
            if _identity(self.place.stat()) == self._before:
                return any((identity is not None) != self.holds(name) for name, identity in tuple(self._seen.items()))
        return True


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def undisturbed(path: Path, make: Callable[[Folder], Made]) -> Made:
    """Return `make(folder)`; raise an error if the folder was replaced while `make` ran.

    Raises:
        BundleError: there is no such folder, or it was replaced or removed while `make` ran.
        TxlError: `make` raised it, and the folder was not replaced.
    """
    try:
        folder = Folder(path)
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}, expected a bundle (a folder); look at its path") from None
    try:
        result = make(folder)
    except TxlError:
        if not folder.replaced:
            raise
    else:
        if not folder.replaced:
            return result
    raise BundleError(
        f"{path}: was replaced or removed while it was being loaded, expected it to stay for as long as a load takes; "
        "load it again"
    )


ASIDE = ".replaced-"
"""Part of a hidden name, e.g. `.demo.txl.replaced-1a2b`, to which an old bundle is renamed to make room for
a new one.
"""


def stepped_aside(path: Path) -> str:
    """Return advice for a missing bundle if its replacement was interrupted; else "".

    If the system cannot exchange two folders in one step, the old folder is renamed before the new one gets its name.
    After an interrupt between the two renames, the old bundle still exists under its hidden name.
    """
    try:
        names = sorted(name for name in os.listdir(path.parent) if name.startswith(f".{path.name}{ASIDE}"))  # noqa: PTH208
    except OSError:
        return ""
    return f"; {names[0]} beside it is what stood there before its replacement began: rename it back" if names else ""
