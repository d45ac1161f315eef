"""The folder of a bundle: files opened so that they cannot hang or lead elsewhere, and whether they are still those.

An engine opens some files by their paths, so that a hash alone does not tell that the engine got what was hashed. A
file is therefore remembered by its identity, of the descriptor that it was read from, and looked at again when all is
open. So is the folder itself: `export --force` exchanges folders, perhaps there and back.
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
"""Device, number, size, time of writing, time of change."""
Made = TypeVar("Made")


class Folder:
    """A folder whose files are opened here; it remembers the identity of each file that it opened.

    Attributes:
        path: as it was given, for people.
        place: where that led when the folder was opened; a link that is switched later does not matter.

    Raises:
        OSError: there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, Path(os.path.realpath(path))
        self._seen: dict[str, Identity | None] = {}
        self._before = _identity(self.place.stat())

    @contextmanager
    def open(self, name: str) -> Iterator[tuple[BinaryIO, bool]]:
        """A plain file in the folder, for reading, and whether it is the one that was opened under this name first.

        Raises:
            OSError: it cannot be opened, is no plain file, or a link leads out of the folder.
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
        """Whether a file is the one that was opened under this name first."""
        try:
            with self.open(name) as (_, same):
                return same
        except OSError:
            return False

    @property
    def replaced(self) -> bool:
        """Whether the folder or a file that was opened is another one now, or has changed since."""
        with suppress(OSError):
            if _identity(self.place.stat()) == self._before:
                return any((identity is not None) != self.holds(name) for name, identity in tuple(self._seen.items()))
        return True


def _identity(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def undisturbed(path: Path, make: Callable[[Folder], Made]) -> Made:
    """Make something of a bundle's folder, and refuse it where the folder was replaced meanwhile.

    Raises:
        BundleError: there is no such folder, or it was replaced or removed meanwhile.
        TxlError: what `make` raises of a folder that was not replaced.
    """
    try:
        folder = Folder(path)
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}, expected a bundle (a folder); look at its path") from None
    try:
        made = make(folder)
    except TxlError:
        if not folder.replaced:
            raise
    else:
        if not folder.replaced:
            return made
    raise BundleError(
        f"{path}: was replaced or removed while it was being loaded, expected it to stay for as long as a load takes; "
        "load it again"
    )


ASIDE = ".replaced-"
"""In hidden names beside a name: of a bundle that stepped aside for a new one."""


def stepped_aside(path: Path) -> str:
    """What to say of a bundle that is not there because a replacement was cut short; nothing where none was.

    Where two folders cannot be exchanged in one step, the old one steps aside before the new one gets its name.
    """
    try:
        found = sorted(name for name in os.listdir(path.parent) if name.startswith(f".{path.name}{ASIDE}"))  # noqa: PTH208
    except OSError:
        return ""
    return f"; {found[0]} beside it is what stood there before its replacement began: rename it back" if found else ""
