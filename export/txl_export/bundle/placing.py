"""Putting a bundle in its place: all of it or nothing, whatever happens in between.

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
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout
from txl_runtime.bundle.reading import MANIFEST
from txl_runtime.errors import TxlError, UsageError

PARTIAL, ASIDE, LOCK = ".partial-", ".replaced-", ".lock"


def check_destination(target: Path, force: bool) -> None:
    """Refuse a place where no bundle can go, before any work is done.

    Raises:
        UsageError: it exists and `force` is off, it is no bundle, or its parent is no folder.
    """
    parent = target.parent
    if not target.name:
        raise UsageError(f"{target}: not a name for a bundle, expected e.g. model.txl; give another -o")
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
    if not target.is_dir() or target.is_symlink() or (any(target.iterdir()) and not (target / MANIFEST).is_file()):
        raise UsageError(
            f"{target}: is not a bundle, --force replaces only bundles; remove it yourself or give another -o"
        )


@contextlib.contextmanager
def publishing(target: Path, force: bool) -> Iterator[Path]:
    """A folder to build a bundle in. It gets its final name when the block ends without an error, else it is removed.

    Raises:
        UsageError: as `check_destination`.
        TxlError: the disk is full or the place cannot be written.
    """
    check_destination(target, force)
    partial = target.parent / f".{target.name}{PARTIAL}{secrets.token_hex(4)}"
    lock = FileLock(_lock_file(partial))
    try:
        _begin(partial, target, lock)
        yield partial
        _sync(partial)
        check_destination(target, force)
        _place(partial, target)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise TxlError(f"{target}: the disk is full, nothing was written; make room or give another -o") from None
        raise TxlError(f"{target}: {error.strerror or error}; nothing was written; give another -o") from None
    finally:
        _remove(partial)
        lock.release()


def _begin(partial: Path, target: Path, lock: BaseFileLock) -> None:
    try:
        _recover(target)
        lock.acquire()
        partial.mkdir()
    except OSError as error:
        raise TxlError(
            f"{target.parent}: {error.strerror}; expected a folder that can be written; give another -o"
        ) from None


def _place(partial: Path, target: Path) -> None:
    """Give the finished folder its name. An old bundle is then where the new one grew, so `publishing` removes it."""
    if not target.exists():
        partial.rename(target)
    elif not _exchange(partial, target):
        aside = target.parent / f".{target.name}{ASIDE}{os.getpid()}"
        try:
            target.rename(aside)
            partial.rename(target)
        except BaseException:
            if not target.exists():
                aside.rename(target)
            raise
        _remove(aside)
    elif not (target / MANIFEST).is_file():
        raise TxlError(f"{target}: changed while it was replaced; export again")


def _remove(folder: Path) -> None:
    """Remove a folder and its lock file; an interrupt has to wait until they are gone."""
    try:
        _remove_now(folder)
    except BaseException:
        _remove_now(folder)
        raise


def _remove_now(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # on Windows a held lock's file goes when the lock is released
        _lock_file(folder).unlink(missing_ok=True)


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
    name = glob.escape(target.name)
    for aside in sorted(target.parent.glob(f".{name}{ASIDE}*")):
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(target)
    left = target.parent.glob(f".{name}{PARTIAL}*")
    for partial in {path.with_name(path.name.removesuffix(LOCK)) for path in left}:
        with contextlib.suppress(Timeout), FileLock(_lock_file(partial), timeout=0):
            _remove_now(partial)


def _sync(folder: Path) -> None:
    """Write every file through to the disk, so that a bundle under its final name is complete after a power cut."""
    mask = os.umask(0)
    os.umask(mask)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            path.chmod(0o666 & ~mask)  # some writers are more private than the user asked to be
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
