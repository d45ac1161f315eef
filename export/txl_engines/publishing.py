"""New files of engines, put into a bundle: all of them or none, and the bundle loads at every moment in between.

Files grow in a hidden folder of the bundle and are then renamed. A bundle whose manifest promises a file that is not
there would not load. So the manifest first forgets the engines that are to be replaced, and lists the new ones last.
Each of these steps is on the disk before the next one begins, so that a loss of power is no worse than a kill.
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
from txl_runtime.bundle.writing import sync_folder, write_file
from txl_runtime.errors import BackendError, BundleError, TxlError, UsageError

if TYPE_CHECKING:
    from filelock import BaseFileLock

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
            TxlError: the disk failed in the middle of it; the next build puts right what is then not listed.
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
        kept = {name: record for name, record in listed.items() if name not in {*records, *self._dropped}}
        # Whatever needs room or rights is done before the bundle changes; then there is nothing left but names.
        forgets = None if len(kept) == len(listed) else self._written("forgets", document | {"files": kept})
        lists = self._written("lists", document | {"files": dict(sorted((kept | records).items()))})
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
                with contextlib.suppress(OSError):  # unlisted, it is nobody's; Windows keeps what a process has open
                    (self._bundle / name).unlink()

    def _written(self, name: str, document: Mapping[str, Any]) -> Path:
        """Write a manifest beside the files that it is about."""
        data = msgspec.json.format(msgspec.json.encode(document))
        decode_manifest(data, MANIFEST)
        path = self._folder / f"{name}-{MANIFEST}"
        write_file(path, data)
        return path

    def _rename(self, names: Sequence[tuple[Path, Path]]) -> None:
        """Give files their names, and return when the disk holds these; folders above may be new as well."""
        for path, final in names:
            path.replace(final)
        for folder in {above for _, final in names for above in final.parents if above.is_relative_to(self._bundle)}:
            sync_folder(folder)


@contextlib.contextmanager
def staging(bundle: Path) -> Iterator[Staging]:
    """A place to put new files of a bundle. Those that were not published are gone afterwards.

    No other build can work on the bundle meanwhile; the lock ends with the process. What killed builds left is removed.

    Raises:
        UsageError: another build is at work on the bundle, or its folder cannot be written to.
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
    """Remove a folder as far as that goes. An interrupt that arrives meanwhile is passed on when the folder is gone."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # not all of them are ignored, and an interrupt in the wrong place comes out as one
        with contextlib.suppress(OSError):
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
        except BaseException:  # an interrupt has to wait until that is done
            _unlock(lock)
            raise


def _unlock(lock: BaseFileLock) -> None:
    """Remove a lock's file while it is held, also where an interrupt came before it was; and let it go."""
    with contextlib.suppress(OSError, NotImplementedError):  # Windows removes it when it is released
        lock.acquire(timeout=0)
        Path(lock.lock_file).unlink(missing_ok=True)
    lock.release(force=True)


def _not_writable(bundle: Path, error: OSError) -> UsageError:
    return UsageError(f"{bundle}: {error.strerror}; expected a bundle that can be written to; copy it to where it can")
