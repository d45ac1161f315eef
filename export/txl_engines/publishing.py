"""New engines into a bundle: all of them or none, and a bundle that loads at every moment in between.

Files grow in a hidden folder of the bundle and are renamed. A manifest that promises what is not there would not load,
so it forgets the engines that are about to be replaced first, and learns of the new ones last.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.bundle.manifest import decode_manifest
from txl_runtime.bundle.reading import MANIFEST
from txl_runtime.errors import BundleError, TxlError, UsageError

__all__ = ["Staging", "staging", "write_file"]

PARTIAL = ".building-"


class Staging:
    """Files on their way into a bundle. `publish` gives all of them their names."""

    def __init__(self, bundle: Path, folder: Path, manifest: bytes) -> None:
        self._bundle, self._folder, self._manifest = bundle, folder, manifest
        self._files: dict[str, Path] = {}

    def reserve(self, name: str) -> Path:
        """Where to write a file that will be `name` in the bundle."""
        path = self._folder / f"{len(self._files)}-{Path(name).name}"
        self._files[name] = path
        return path

    def place(self, name: str, data: bytes) -> None:
        """Write a file that will be `name` in the bundle."""
        write_file(self.reserve(name), data)

    def publish(self) -> None:
        """Give every file its name, and let the manifest list them.

        Raises:
            BundleError: somebody else changed the bundle meanwhile.
        """
        if not self._files:
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
            if listed.keys() & records.keys():
                document["files"] = {name: record for name, record in listed.items() if name not in records}
                self._write_manifest(document)
            for name, path in self._files.items():
                final = self._bundle / name
                final.parent.mkdir(parents=True, exist_ok=True)
                path.replace(final)
            document["files"] = dict(sorted((listed | records).items()))
            self._write_manifest(document)

    def _write_manifest(self, document: Mapping[str, Any]) -> None:
        data = msgspec.json.format(msgspec.json.encode(document))
        decode_manifest(data, MANIFEST)
        path = self._folder / MANIFEST
        write_file(path, data)
        path.replace(self._bundle / MANIFEST)


def write_file(path: Path, data: bytes) -> None:
    """Write bytes so that the disk holds them."""
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


@contextlib.contextmanager
def staging(bundle: Path) -> Iterator[Staging]:
    """A place to put new files of a bundle; what was not published is gone afterwards.

    Holds the bundle against other builds, by a lock that ends with the process, and removes what killed ones left.

    Raises:
        UsageError: another build is at work on it, or the folder cannot be written.
        TxlError: the disk is full.
    """
    with _lock(bundle):
        try:
            if sys.platform != "win32":  # without a lock it could be the folder of a build that is at work
                for left in bundle.glob(f"{PARTIAL}*"):
                    shutil.rmtree(left, ignore_errors=True)
            folder = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=bundle))
        except OSError as error:
            raise UsageError(
                f"{bundle}: {error.strerror}; expected a bundle that can be written to; copy it to where it can"
            ) from None
        try:
            yield Staging(bundle, folder, (bundle / MANIFEST).read_bytes())
        except OSError as error:
            raise TxlError(
                f"{bundle}: {error.strerror or error}; expected room and rights to write engines, none was added"
            ) from None
        finally:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder; an interrupt has to wait until it is gone."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Interrupts wait until some renames are done: between them the old engines are not listed and the new not yet."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are not for this thread
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
    if sys.platform == "win32":
        yield  # no locks on folders there
        return
    import fcntl

    descriptor = os.open(bundle, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UsageError(
            f"{bundle}: another build is at work on it, expected one at a time; wait until it has ended"
        ) from None
    except OSError as error:
        os.close(descriptor)
        raise UsageError(
            f"{bundle}: cannot be locked ({error.strerror}), expected a file system with locks; copy it to a local disk"
        ) from None
    try:
        yield
    finally:
        os.close(descriptor)
