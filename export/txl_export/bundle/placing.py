"""Publishes a bundle, or a folder of a different kind, completely or not at all, even if the process is killed.

A bundle is built in a hidden folder next to its final name and renamed when it is complete. If the bundle replaces an
old one, one system call swaps the two folders on Linux; on other systems the old folder is renamed first. A lock file
lies next to the hidden folder. A killed process leaves both behind but no longer holds the lock, so the next run may
remove folder and lock file.
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
from txl_runtime.bundle.writing import PARTIAL
from txl_runtime.errors import TxlError, UsageError
from txl_runtime.system import sync_folder

LOCK = ".lock"


class Kind(NamedTuple):
    """A kind of folder that is published.

    Attributes:
        noun: the kind's name in messages.
        marker: a file that only this kind of folder has; a folder without this file is replaced only if it is empty.
        example: an example of such a folder's path.
    """

    noun: str
    marker: str
    example: str


BUNDLE = Kind("bundle", MANIFEST, "model.txl")


def is_text(path: Path) -> bool:
    """Return whether a path is UTF-8; a Linux path may hold other bytes, which some libraries refuse."""
    return not re.search("[\ud800-\udfff]", str(path))


def check_destination(target: Path, force: bool, kind: Kind = BUNDLE) -> None:
    """Refuse a path at which a bundle cannot be written, before any work is done.

    Raises:
        UsageError: the path exists and `force` is off, the path is no bundle or not UTF-8, or its parent is no folder.
        TxlError: the path cannot be read.
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
        present = "a file" if parent.exists() else "nothing"
        raise UsageError(
            f"{parent}: found {present}, expected a folder to write {target.name} into; create it or give another -o"
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
    """Yield a hidden folder to build a bundle (or `kind`) in; rename it when the block ends, remove it on an error.

    A bundle with its final name survives a loss of power: its files are flushed to the disk before the renaming.

    Raises:
        UsageError: see `check_destination`.
        TxlError: the disk is full, or the folder cannot be written.
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
        except BaseException:  # Ctrl-C during the removal: finish the removal first
            _clean(partial, target)
            raise
        finally:
            lock.release()


@contextlib.contextmanager
def _explained(place: Path, outcome: str) -> Iterator[None]:
    """Turn an OSError inside the block into a TxlError of one line."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if full else error.strerror or str(error)
        advice = "make room or give another -o" if full else "give another -o"
        raise TxlError(f"{place}: {reason}; {outcome}; {advice}") from None


def _place(partial: Path, target: Path, kind: Kind) -> None:
    """Give the finished folder its name; swap it with an old bundle, or set the old bundle aside."""
    if not target.exists():
        partial.rename(target)
    elif _exchange(partial, target):
        if not _replaceable(partial, kind):  # the target changed after the check
            _exchange(partial, target)
            raise _other(target, kind)
    else:
        aside = target.parent / f".{target.name}{ASIDE}{os.getpid()}"
        target.rename(aside)
        if not _replaceable(aside, kind):
            raise _other(target, kind)
        partial.rename(target)


def _clean(partial: Path, target: Path) -> None:
    """Remove the hidden folders; a folder that cannot be removed now is left to the next run."""
    _remove(partial)
    with contextlib.suppress(OSError):
        _settle(target)


def _remove(folder: Path) -> None:
    """Remove a folder and its lock file."""
    _remove_tree(folder)
    with contextlib.suppress(OSError):  # Windows deletes a held lock's file when the lock is released
        _lock_file(folder).unlink(missing_ok=True)


def _remove_tree(folder: Path) -> None:
    for _ in range(2):  # Ctrl-C inside rmtree may surface as an OSError: try again
        with contextlib.suppress(OSError):  # ignore_errors ignores only some errors
            shutil.rmtree(folder, ignore_errors=True)


def _settle(target: Path) -> None:
    """If the new bundle is missing, give the bundle that was set aside its name back; else remove the old bundle."""
    for aside in sorted(target.parent.glob(f".{glob.escape(target.name)}{ASIDE}*")):
        if target.exists():
            _remove_tree(aside)
        else:
            aside.rename(target)


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{LOCK}")


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step (Linux renameat2 with RENAME_EXCHANGE); return False if that fails."""
    if sys.platform != "linux":
        return False
    at_cwd, rename_exchange = -100, 2
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    return bool(renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), rename_exchange) == 0)


def _recover(target: Path) -> None:
    """Clean up after killed runs: give a bundle that was set aside its name back, and remove unfinished folders."""
    _settle(target)
    left = target.parent.glob(f".{glob.escape(target.name)}{PARTIAL}*")
    for partial in {path.with_name(path.name.removesuffix(LOCK)) for path in left}:
        with contextlib.suppress(Timeout), FileLock(_lock_file(partial), timeout=0):
            _remove(partial)


def _sync(folder: Path) -> None:
    """Flush every file and folder to the disk, so that a renamed folder is complete after a loss of power."""
    mask = os.umask(0)
    os.umask(mask)
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            sync_folder(path)
        elif path.is_file():
            path.chmod(0o666 & ~mask)  # some writers set fewer rights than the umask allows
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
    sync_folder(folder)
