"""Publishes new engine files in a bundle: all or none, and the bundle can be loaded at every moment.

Files are written into a hidden folder of the bundle and then renamed. A bundle with a listed file missing would not
load, so the manifest first drops the engines that are replaced, and lists the new ones at the end. Each of these steps
is flushed to the disk before the next, so a loss of power does no more harm than a kill.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.bundle.manifest import decode_manifest
from txl_runtime.bundle.reading import MANIFEST
from txl_runtime.bundle.writing import write_file
from txl_runtime.errors import BackendError, BundleError, TxlError, UsageError
from txl_runtime.system import sync_folder

if TYPE_CHECKING:
    from filelock import BaseFileLock

PARTIAL = ".building-"
LOCK = ".building.lock"


class Staging:
    """New files of a bundle in a hidden folder; `publish` gives all of them their names."""

    def __init__(self, bundle: Path, folder: Path, manifest: bytes) -> None:
        self._bundle, self._folder, self._manifest = bundle, folder, manifest
        self._files: dict[str, Path] = {}
        self._dropped: set[str] = set()

    def reserve(self, name: str) -> Path:
        """Return the path for writing a file that `publish` will call `name`."""
        path = self._folder / f"{len(self._files)}-{Path(name).name}"
        self._files[name] = path
        return path

    def place(self, name: str, data: bytes) -> None:
        """Write a file that `publish` will call `name`."""
        write_file(self.reserve(name), data)

    def drop(self, name: str) -> None:
        """Remove a file from the bundle at the next `publish`."""
        self._dropped.add(name)

    def publish(self) -> None:
        """Rename every file to its name, list these files in the manifest, and remove the dropped files.

        Raises:
            BundleError: the bundle has changed since `staging` began.
            TxlError: the disk failed half-way; the next build lists engines that are left unlisted.
        """
        if not self._files and not self._dropped:
            return
        target = self._bundle / MANIFEST
        if target.read_bytes() != self._manifest:
            raise BundleError(
                f"{self._bundle}: changed while engines were built for it, expected it to stay; build again"
            )
        records = {
            name: {"size": path.stat().st_size, "sha256": file_sha256(path)} for name, path in self._files.items()
        }
        document = msgspec.json.decode(self._manifest)
        listed: dict[str, Any] = document["files"]
        remaining = {name: record for name, record in listed.items() if name not in {*records, *self._dropped}}
        # Do everything that needs space or rights before the bundle changes: only renames follow.
        forgets = None if len(remaining) == len(listed) else self._written("forgets", document | {"files": remaining})
        lists = self._written("lists", document | {"files": dict(sorted((remaining | records).items()))})
        finals = [self._bundle / name for name in records]
        for final in finals:
            final.parent.mkdir(parents=True, exist_ok=True)
        with _undisturbed():
            try:
                if forgets is not None:
                    self._rename([(forgets, target)])
                self._rename([*zip(self._files.values(), finals, strict=True)])
                self._rename([(lists, target)])
            except OSError as error:
                raise TxlError(
                    f"{self._bundle}: {error.strerror}; the model is whole, but engines that were to be replaced may "
                    "be unlisted; build again"
                ) from None
            for name in self._dropped:
                with contextlib.suppress(OSError):  # Windows keeps an open file, which is unlisted already
                    (self._bundle / name).unlink()

    def _written(self, name: str, document: Mapping[str, Any]) -> Path:
        """Write a manifest into the hidden folder; return its path."""
        data = msgspec.json.format(msgspec.json.encode(document))
        decode_manifest(data, MANIFEST)
        path = self._folder / f"{name}-{MANIFEST}"
        write_file(path, data)
        return path

    def _rename(self, names: Sequence[tuple[Path, Path]]) -> None:
        """Rename files, then flush their folders, and the bundle's folders above (which may be new), to the disk."""
        for path, final in names:
            path.replace(final)
        for folder in {above for _, final in names for above in final.parents if above.is_relative_to(self._bundle)}:
            sync_folder(folder)


@contextlib.contextmanager
def staging(bundle: Path) -> Iterator[Staging]:
    """Yield a `Staging` for new files of a bundle; files that are not published are removed afterwards.

    A lock, which ends with the process, keeps other builds out. Leftovers of killed builds are removed.

    Raises:
        UsageError: another build is running on the bundle, or its folder cannot be written to.
        TxlError: the disk is full.
    """
    with _lock(bundle):
        folder = bundle / f"{PARTIAL}{secrets.token_hex(4)}"
        try:
            try:
                for left in bundle.glob(f"{PARTIAL}*"):
                    _remove(left)
                folder.mkdir(mode=0o700)
            except OSError as error:
                raise _not_writable(bundle, error) from None
            yield Staging(bundle, folder, (bundle / MANIFEST).read_bytes())
        except OSError as error:
            raise TxlError(
                f"{bundle}: {error.strerror or error}; expected room and rights to write engines, none was added"
            ) from None
        finally:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder as far as possible; an interrupt during the removal is raised after the removal."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # rmtree lets some OSErrors through, and turns some interrupts into OSErrors
        with contextlib.suppress(OSError):
            shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Delay interrupts until all renames are done, because between them neither old nor new engines are listed."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach only the main thread
        return
    arrived: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: arrived.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if arrived:
            signal.raise_signal(arrived[0])


@contextlib.contextmanager
def _lock(bundle: Path) -> Iterator[None]:
    try:
        from filelock import FileLock, Timeout
    except ModuleNotFoundError:
        raise BackendError(
            "filelock is not installed, expected it to write into a bundle; pip install filelock"
        ) from None
    lock = FileLock(bundle / LOCK)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UsageError(
                f"{bundle}: another build is at work on it, expected one at a time; wait until it has ended"
            ) from None
        except (OSError, NotImplementedError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise _not_writable(bundle, error) from None
            raise UsageError(
                f"{bundle}: cannot be locked ({error}), expected a file system with locks; copy it to a local disk"
            ) from None
        yield
    finally:
        try:
            _unlock(lock)
        except BaseException:  # an interrupt came during the release: finish it
            _unlock(lock)
            raise


def _unlock(lock: BaseFileLock) -> None:
    """Delete a lock's file while holding the lock, which an interrupt may have released; then release the lock."""
    with contextlib.suppress(OSError, NotImplementedError):  # Windows deletes the file when the lock is released
        lock.acquire(timeout=0)
        Path(lock.lock_file).unlink(missing_ok=True)
    lock.release(force=True)


def _not_writable(bundle: Path, error: OSError) -> UsageError:
    return UsageError(f"{bundle}: {error.strerror}; expected a bundle that can be written to; copy it to where it can")
