"""Functions that open, check and read a bundle. An open bundle never reads files of a bundle that replaces it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from numpy.typing import NDArray

from txl_runtime.bundle.contents import decode_report, decode_vectors, read_tensors
from txl_runtime.bundle.folder import Folder, stepped_aside, undisturbed
from txl_runtime.bundle.manifest import MOST_BYTES, Manifest, decode_manifest
from txl_runtime.errors import BundleError

if TYPE_CHECKING:
    from txl_runtime.bundle.vocabulary import Vocabulary

MANIFEST, SELFTEST, REPORT = "manifest.json", "selftest.safetensors", "report.json"
"""File names that exports write. The file of stored vectors is read by the name in the manifest."""
WEIGHTS = "weights.safetensors"
"""Name that exports give to the weight file."""
ENGINES = "engines/"
"""Folder of engines. Only the backend that opens an engine checks it: a bundle stays usable if an engine is lost."""
NATIVE = "engines/native/"
"""Folder of the compiled step, an engine whose description file has a format of its own."""


@dataclass(frozen=True)
class Bundle:
    """A bundle whose manifest was read and whose files, except engines, were checked.

    A bundle reads only files that the manifest lists and that have not been replaced since the bundle was opened.
    """

    path: Path
    manifest: Manifest
    folder: Folder = field(repr=False, compare=False)
    verify_files: bool = True

    def file(self, name: str) -> Path:
        """Return the path of a file that the manifest lists."""
        return self.folder.place / name

    def check(self, name: str) -> None:
        """Compare a file's size with the manifest, and with `verify_files` its hash.

        Raises:
            BundleError: the file is not listed, missing, truncated or altered.
        """
        with self._opened(name) as (file, same):
            digest = hashlib.sha256()
            while self.verify_files and (piece := file.read(1 << 20)):
                digest.update(piece)
            if self.verify_files:
                self._compare(name, digest.hexdigest(), same)

    def read(self, name: str) -> bytes:
        """Return the content of a file that the manifest lists, after comparing exactly these bytes with the manifest.

        Without `verify_files` the hash is compared only if the file was replaced since the bundle was opened.

        Raises:
            BundleError: the file is not listed, missing, truncated, altered, or of a different bundle.
        """
        with self._opened(name) as (file, same):
            data = file.read(self.manifest.files[name].size + 1)
        if self.verify_files or not same:
            self._compare(name, hashlib.sha256(data).hexdigest(), same)
        return data

    def parts(self, name: str, places: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """Return an iterator of parts of a large file; `places` are (offset, size) in bytes.

        Raises:
            BundleError: a part lies beyond the file's end (raised at once), or the file was replaced (while iterating).
        """
        end = max((offset + size for offset, size in places), default=0)
        if name in self.manifest.files and end > self.manifest.files[name].size:
            raise self._refused(name, f"ends before byte {end}, where a weight of an engine does")
        return self._parts(name, places)

    def _parts(self, name: str, places: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        with self._opened(name) as (file, same):
            if not same:
                raise self._refused(name, "", same)
            for offset, size in places:
                file.seek(offset)
                yield file.read(size)

    def vocabulary(self) -> Vocabulary | None:
        """Return the vocabulary, which turns text into token ids and back; None if the bundle has none.

        Raises:
            BundleError: the file is no vocabulary, or was replaced since the bundle was opened.
        """
        from txl_runtime.bundle.vocabulary import decode_vocabulary

        name = self.manifest.vocabulary
        return decode_vocabulary(self.read(name), self.manifest.vocab_size, str(self.file(name))) if name else None

    def weights(self, *names: str) -> dict[str, NDArray[Any]]:
        """Return tensors of the weight file by name, e.g. {"embedding": [V, D]}.

        For example, `bundle.weights("embedding")["embedding"]` is [256, 32].

        Raises:
            BundleError: the file is not safetensors, lacks a name, or was replaced since the bundle was opened.
        """
        name = self.manifest.weights
        tensors = read_tensors(self.file(name), names)
        if not self.folder.holds(name):
            raise self._refused(name, "", False)
        return tensors

    def selftest(self) -> dict[str, NDArray[Any]]:
        """Return the stored vectors as arrays by name, e.g. {"length": [steps]}; the module `selftest` describes them.

        With three steps, "length" is e.g. [4, 4, 1].

        Raises:
            BundleError: the bundle has no vectors, or they cannot be read.
        """
        name = self.manifest.selftest
        if name is None:
            raise BundleError(f"{self.path}: holds no {SELFTEST}, expected the vectors export writes; export again")
        return decode_vectors(self.read(name), str(self.file(name)))

    def report(self) -> dict[str, Any]:
        """Return the verification report that export wrote; {} if the manifest lists none.

        Raises:
            BundleError: the file is no report, or was replaced since the bundle was opened.
        """
        return decode_report(self.read(REPORT), str(self.file(REPORT))) if REPORT in self.manifest.files else {}

    @contextmanager
    def _opened(self, name: str) -> Iterator[tuple[BinaryIO, bool]]:
        """Open a file that has the manifest's size; yield (file, True if the file was not replaced since the bundle was
        opened).
        """
        record = self.manifest.files.get(name)
        if record is None:
            raise self._refused(name, "is used but not in the list of files")
        try:
            with self.folder.open(name) as (file, same):
                if (size := os.fstat(file.fileno()).st_size) != record.size:
                    raise self._refused(name, f"{size} bytes, expected {record.size}", same)
                yield file, same
        except FileNotFoundError:
            raise self._refused(name, f"missing, expected a file of {record.size} bytes") from None
        except OSError as error:
            raise self._refused(name, f"{error.strerror}, expected a plain file of {record.size} bytes") from None

    def _compare(self, name: str, found: str, same: bool) -> None:
        if found != self.manifest.files[name].sha256:
            raise self._refused(name, "its SHA-256 is not the manifest's, the file was altered", same)

    def _refused(self, name: str, found: str, same: bool = True) -> BundleError:
        advice = "build it with `txl-deploy build`" if name.startswith(ENGINES) else "export the model"
        message = f"{found}; {advice} again, or copy the bundle again"
        if not same:
            message = "is not the file that the bundle was opened with, expected the same; load the bundle again"
        return BundleError(f"{self.file(name)}: {message}")


def open_bundle(path: str | Path, verify_files: bool = True) -> Bundle:
    """Read a bundle's manifest and check its files except engines: sizes always, hashes with `verify_files`.

    Raises:
        BundleError: the folder, its manifest or one of its files is missing, truncated or altered, or the folder was
            replaced during the call.
    """
    return undisturbed(bundle_path(path), partial(read_bundle, verify_files=verify_files))


def bundle_path(path: str | Path) -> Path:
    """Return the path of a bundle's folder, after checking that the folder exists.

    Raises:
        BundleError: the argument is no path, or there is no folder at the path.
    """
    if not isinstance(path, str | PathLike) or not isinstance(fspath(path), str):
        raise BundleError(f"the bundle is given as {type(path).__name__}, expected the path of its folder")
    folder = Path(path)
    if not folder.is_dir():
        kind, advice = "a file" if folder.is_file() else "nothing", "make one with `txl-deploy export`"
        raise BundleError(f"{folder}: found {kind}, expected a bundle (a folder); {advice}{stepped_aside(folder)}")
    return folder


def read_bundle(folder: Folder, verify_files: bool = True) -> Bundle:
    """Read and check a bundle as `open_bundle` does, but without noticing if its folder is replaced during the call."""
    path = folder.place / MANIFEST
    try:
        with folder.open(MANIFEST) as (file, _):
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise BundleError(
            f"{folder.path}: no {MANIFEST} in it, expected a bundle; make one with `txl-deploy export`"
        ) from None
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}, expected a readable manifest; copy the bundle again") from None
    manifest = decode_manifest(data, str(path))
    bundle = Bundle(folder.path, manifest, folder, verify_files)
    for name in manifest.files:
        if not name.startswith(ENGINES) or name in manifest.used_files:
            bundle.check(name)
    return bundle
