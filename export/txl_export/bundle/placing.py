"""Putting a bundle in its place, or another folder of files: all of it or nothing, whatever happens in between.

A bundle grows in a hidden folder beside its final name and is renamed when it is complete. Where it replaces an old
bundle, the two folders change places in one system call where there is one (Linux); elsewhere the old one steps aside
first. A lock file stands beside the hidden folder. A process that is killed leaves both behind, but it no longer holds
the lock: that tells the next run that it may clean up.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout
from txl_runtime.bundle.folder import ASIDE
from txl_runtime.bundle.reading import MANIFEST
from txl_runtime.bundle.writing import PARTIAL, sync_folder
from txl_runtime.errors import TxlError, UsageError

LOCK = ".lock"


class Kind(NamedTuple):
    """What is put into place.

    Attributes:
        noun: what people call it.
        marker: the file that only such a folder has: no other folder is ever replaced.
        example: a name for one.
    """

    noun: str
    marker: str
    example: str


BUNDLE = Kind("bundle", MANIFEST, "model.txl")


def is_text(path: Path) -> bool:
    """Whether a path is UTF-8; a Linux path may hold any bytes, and some libraries open others not at all."""
    return not re.search("[\ud800-\udfff]", str(path))


def check_destination(target: Path, force: bool, kind: Kind = BUNDLE) -> None:
    """Refuse a place where no bundle can go, before any work is done.

    Raises:
        UsageError: it exists and `force` is off, it is no bundle, or its parent is no folder.
        TxlError: the place cannot be read.
    """
    with _explained(target, "nothing was written"):
        _check(target, force, kind)


def _check(target: Path, force: bool, kind: Kind) -> None:
    parent = target.parent
    if not target.name:
        raise UsageError(f"{target}: not a name for a {kind.noun}, expected e.g. {kind.example}; give another -o")
    if kind is BUNDLE and not is_text(target):
        raise UsageError(
            f"{target}: a path with bytes that are no UTF-8, which ONNX's checker does not open, expected a name in "
            "UTF-8; give another -o, and rename the bundle afterwards"
        )
    if not parent.is_dir():
        found = "a file" if parent.exists() else "nothing"
        raise UsageError(
            f"{parent}: found {found}, expected a folder to write {target.name} into; create it or give another -o"
        )
    if not os.path.lexists(target):
        return
    if not force:
        raise UsageError(
            f"{target}: exists already, expected a free name; add --force to replace it, or give another -o"
        )
    if not _replaceable(target, kind):
        raise _other(target, kind)


def _replaceable(folder: Path, kind: Kind) -> bool:
    if not folder.is_dir() or folder.is_symlink():
        return False
    return (folder / kind.marker).is_file() or not any(folder.iterdir())


def _other(target: Path, kind: Kind) -> UsageError:
    return UsageError(
        f"{target}: is not a {kind.noun}, --force replaces only {kind.noun}s; remove it yourself or give another -o"
    )


@contextlib.contextmanager
def publishing(target: Path, force: bool, kind: Kind = BUNDLE) -> Iterator[Path]:
    """A folder to build a bundle in, or another `kind`. It gets its final name when the block ends, else it is removed.

    A bundle that has its name survives a loss of power: everything in it is written through to the disk before.

    Raises:
        UsageError: as `check_destination`.
        TxlError: the disk is full or the place cannot be written.
    """
    check_destination(target, force, kind)
    partial = target.parent / f".{target.name}{PARTIAL}{secrets.token_hex(4)}"
    lock = FileLock(_lock_file(partial))
    try:
        with _explained(target.parent, "expected a folder that can be written"):
            _recover(target)
            lock.acquire()
            partial.mkdir()
        with _explained(target, "nothing was written"):
            yield partial
            _sync(partial)
            _check(target, force, kind)
            _place(partial, target, kind)
        with _explained(target, f"the new {kind.noun} is there, but a loss of power may undo that"):
            sync_folder(target.parent)  # before the old bundle's files are removed
    finally:
        try:
            _clean(partial, target)
        except BaseException:  # an interrupt has to wait until that is done
            _clean(partial, target)
            raise
        finally:
            lock.release()


@contextlib.contextmanager
def _explained(place: Path, outcome: str) -> Iterator[None]:
    """Tell in one line what the system refused."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        said = "the disk is full" if full else error.strerror or str(error)
        advice = "make room or give another -o" if full else "give another -o"
        raise TxlError(f"{place}: {said}; {outcome}; {advice}") from None


def _place(partial: Path, target: Path, kind: Kind) -> None:
    """Give the finished folder its name. An old bundle is then where the new one grew, or aside."""
    if not target.exists():
        partial.rename(target)
    elif _exchange(partial, target):
        if not _replaceable(partial, kind):  # it became something else after it had been looked at
            _exchange(partial, target)
            raise _other(target, kind)
    else:
        aside = target.parent / f".{target.name}{ASIDE}{os.getpid()}"
        target.rename(aside)
        if not _replaceable(aside, kind):
            raise _other(target, kind)
        partial.rename(target)


def _clean(partial: Path, target: Path) -> None:
    """Leave nothing hidden; what cannot be removed now is removed by the next run."""
    _remove(partial)
    with contextlib.suppress(OSError):
        _settle(target)


def _remove(folder: Path) -> None:
    """Remove a folder and its lock file."""
    _remove_tree(folder)
    with contextlib.suppress(OSError):  # on Windows a held lock's file goes when the lock is released
        _lock_file(folder).unlink(missing_ok=True)


def _remove_tree(folder: Path) -> None:
    for _ in range(2):  # an interrupt in the wrong place comes out of it as an error of the system
        with contextlib.suppress(OSError):  # not all of them are ignored
            shutil.rmtree(folder, ignore_errors=True)


def _settle(target: Path) -> None:
    """Put back a bundle that stepped aside for one that never came; remove it where the new one is there."""
    for aside in sorted(target.parent.glob(f".{glob.escape(target.name)}{ASIDE}*")):
        if target.exists():
            _remove_tree(aside)
        else:
            aside.rename(target)


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{LOCK}")


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step (Linux renameat2 with RENAME_EXCHANGE); False where that cannot be done."""
    if sys.platform != "linux":
        return False
    at_cwd, rename_exchange = -100, 2
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    return bool(renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), rename_exchange) == 0)


def _recover(target: Path) -> None:
    """Clean up after runs that were killed: put back a bundle that had stepped aside, remove unfinished ones."""
    _settle(target)
    left = target.parent.glob(f".{glob.escape(target.name)}{PARTIAL}*")
    for partial in {path.with_name(path.name.removesuffix(LOCK)) for path in left}:
        with contextlib.suppress(Timeout), FileLock(_lock_file(partial), timeout=0):
            _remove(partial)


def _sync(folder: Path) -> None:
    """Write every file and folder through to the disk, so that what gets a name is complete after a power cut."""
    mask = os.umask(0)
    os.umask(mask)
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            sync_folder(path)
        elif path.is_file():
            path.chmod(0o666 & ~mask)  # some writers are more private than the user asked to be
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
    sync_folder(folder)
