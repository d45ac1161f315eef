"""New files of engines, put into a bundle: all of them or none, and the bundle loads at every moment in between.

Files grow in a hidden folder of the bundle and are then renamed. A bundle whose manifest promises a file that is not
there would not load. So the manifest first forgets the engines that are to be replaced, and lists the new ones last.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.bundle.manifest import decode_manifest
from txl_runtime.bundle.reading import MANIFEST
from txl_runtime.errors import BackendError, BundleError, TxlError, UsageError

PARTIAL = ".building-"
LOCK = ".building.lock"


class Staging:
    """Files on their way into a bundle. `publish` gives all of them their names."""

    def __init__(self, bundle: Path, folder: Path, manifest: bytes) -> None:
        self._bundle, self._folder, self._manifest = bundle, folder, manifest
        self._files: dict[str, Path] = {}
        self._dropped: set[str] = set()

    def reserve(self, name: str) -> Path:
        """Where to write a file that will be `name` in the bundle."""
        path = self._folder / f"{len(self._files)}-{Path(name).name}"
        self._files[name] = path
        return path

    def place(self, name: str, data: bytes) -> None:
        """Write a file that will be `name` in the bundle."""
        write_file(self.reserve(name), data)

    def drop(self, name: str) -> None:
        """Take a file out of the bundle."""
        self._dropped.add(name)

    def publish(self) -> None:
        """Give every file its name, and list them in the manifest; remove those that are dropped.

        Raises:
            BundleError: somebody else changed the bundle in the meantime.
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
        with _undisturbed():
            kept = {name: record for name, record in listed.items() if name not in {*records, *self._dropped}}
            if len(kept) < len(listed):
                document["files"] = kept
                self._write_manifest(document)
            for name, path in self._files.items():
                final = self._bundle / name
                final.parent.mkdir(parents=True, exist_ok=True)
                path.replace(final)
            document["files"] = dict(sorted((kept | records).items()))
            self._write_manifest(document)
            for name in self._dropped:
                with contextlib.suppress(OSError):  # unlisted, it is nobody's; Windows keeps what a process has open
                    (self._bundle / name).unlink()

    def _write_manifest(self, document: Mapping[str, Any]) -> None:
        data = msgspec.json.format(msgspec.json.encode(document))
        decode_manifest(data, MANIFEST)
        path = self._folder / MANIFEST
        write_file(path, data)
        path.replace(self._bundle / MANIFEST)


def write_file(path: Path, data: bytes | memoryview) -> None:
    """Write bytes, and return when the disk holds them."""
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


@contextlib.contextmanager
def staging(bundle: Path) -> Iterator[Staging]:
    """A place to put new files of a bundle. Those that were not published are gone afterwards.

    No other build can work on the bundle meanwhile; the lock ends with the process. What killed builds left is removed.

    Raises:
        UsageError: another build is at work on the bundle, or its folder cannot be written to.
        TxlError: the disk is full.
    """
    with _lock(bundle):
        try:
            for left in bundle.glob(f"{PARTIAL}*"):
                shutil.rmtree(left, ignore_errors=True)
            folder = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=bundle))
        except OSError as error:
            raise _not_writable(bundle, error) from None
        try:
            yield Staging(bundle, folder, (bundle / MANIFEST).read_bytes())
        except OSError as error:
            raise TxlError(
                f"{bundle}: {error.strerror or error}; expected room and rights to write engines, none was added"
            ) from None
        finally:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder. An interrupt that arrives meanwhile is passed on when the folder is gone."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Interrupts wait until the renames are done: between these, neither old engines nor new ones are listed."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread alone
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
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(
            f"{bundle}: another build is at work on it, expected one at a time; wait until it has ended"
        ) from None
    except PermissionError as error:
        raise _not_writable(bundle, error) from None
    except (OSError, NotImplementedError) as error:
        raise UsageError(
            f"{bundle}: cannot be locked ({error}), expected a file system with locks; copy it to a local disk"
        ) from None
    try:
        yield
    finally:
        # Removed while it is held, so that nobody else's is removed; Windows removes it when it is released.
        with contextlib.suppress(OSError):
            (bundle / LOCK).unlink(missing_ok=True)
        lock.release()


def _not_writable(bundle: Path, error: OSError) -> UsageError:
    return UsageError(f"{bundle}: {error.strerror}; expected a bundle that can be written to; copy it to where it can")
