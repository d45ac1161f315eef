"""A bundle on disk: opened, checked, described."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.bundle.manifest import Manifest, decode_manifest
from txl_runtime.errors import BundleError

if TYPE_CHECKING:
    from txl_runtime.bundle.vocabulary import Vocabulary

MANIFEST, SELFTEST, REPORT = "manifest.json", "selftest.npz", "report.json"
WEIGHTS = "weights.safetensors"


ENGINES = "engines/"
"""Files of this folder are checked by the backend that opens them: a lost engine must not cost the model."""


@dataclass(frozen=True)
class Bundle:
    """A folder whose manifest has been read and whose files, all but engines, have been checked."""

    path: Path
    manifest: Manifest
    verify_files: bool = True

    def file(self, name: str) -> Path:
        """Path of a file the manifest lists."""
        return self.path / name

    def check(self, name: str) -> None:
        """Hold a file against the manifest: its size always, its hash unless the bundle was opened without.

        Raises:
            BundleError: it is missing, truncated or altered.
        """
        record = self.manifest.files[name]
        _check_file(self.path, name, record.size, record.sha256 if self.verify_files else None)

    def read(self, name: str) -> bytes:
        """The content of a file the manifest lists, held against the manifest as it is read.

        Raises:
            BundleError: it is missing, truncated or altered, or the bundle was replaced by another one.
        """
        path, record = self.file(name), self.manifest.files[name]
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BundleError(f"{path}: {error.strerror}; expected a readable file; export the model again") from None
        altered = self.verify_files and hashlib.sha256(data).hexdigest() != record.sha256
        if len(data) != record.size or altered:
            raise BundleError(
                f"{path}: is not the file that the bundle was opened with, expected {record.size} bytes of the "
                "manifest's SHA-256; load the bundle again"
            )
        return data

    def vocabulary(self) -> Vocabulary | None:
        """Text to token ids and back, if the checkpoint came with a vocabulary.

        Raises:
            BundleError: its file is no vocabulary, or no longer the one that the bundle was opened with.
        """
        from txl_runtime.bundle.vocabulary import decode_vocabulary

        name = self.manifest.vocabulary
        return decode_vocabulary(self.read(name), self.manifest.vocab_size, str(self.file(name))) if name else None

    def weights(self, *names: str) -> dict[str, NDArray[np.float32]]:
        """Tensors of the weight file by name.

        Raises:
            BundleError: the file is not safetensors or lacks a name.
        """
        from safetensors import SafetensorError, safe_open

        path = self.file(self.manifest.weights)
        try:
            with safe_open(path, framework="numpy") as tensors:
                return {name: tensors.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise BundleError(f"{path}: {error}; expected the bundle's weights; export the model again") from None

    def selftest(self) -> dict[str, NDArray[Any]]:
        """The stored vectors, as arrays by name.

        Raises:
            BundleError: there are none or they cannot be read.
        """
        path = self.file(SELFTEST)
        if SELFTEST not in self.manifest.files:
            raise BundleError(f"{self.path}: holds no {SELFTEST}, expected the vectors export writes; export again")
        data = self.read(SELFTEST)
        try:
            stored = np.load(io.BytesIO(data), allow_pickle=False)
            return {name: stored[name] for name in stored.files}
        except Exception as error:  # numpy, zipfile and zlib each raise their own kinds
            raise BundleError(f"{path}: {error}; expected stored vectors; export the model again") from None

    def report(self) -> dict[str, Any]:
        """The verification report that export wrote; empty where there is none."""
        path = self.file(REPORT)
        if not path.is_file():
            return {}
        try:
            found = msgspec.json.decode(path.read_bytes())
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BundleError(f"{path}: {error}; expected a report; export the model again") from None
        return found if isinstance(found, dict) else {}


class Held:
    """A bundle's folder as it was when a `with` block began; there need not be one.

    A folder that stands under the same name need not be the same bundle: `export --force` exchanges folders. While the
    folder is held open, no other one can get its number. Its time of change tells when it was exchanged and came back.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        with contextlib.suppress(OSError, AttributeError, TypeError, ValueError):  # no folder, or Windows
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._before = _identity_of(path if self._descriptor is None else self._descriptor)

    @property
    def replaced(self) -> bool:
        """Whether another folder stands under the bundle's name now, or did since."""
        return self._before is not None and _identity_of(self._path) != self._before

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def _identity_of(place: str | Path | int) -> tuple[int, int, int] | None:
    """Device, number and time of change of a folder; None where there is none."""
    try:
        found = os.stat(place)  # noqa: PTH116 - of a path or of a descriptor
    except (OSError, TypeError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def open_bundle(path: str | Path, verify_files: bool = True) -> Bundle:
    """Read a bundle's manifest and check its files but engines: sizes always, hashes with `verify_files`.

    Raises:
        BundleError: the folder, its manifest or one of its files is missing, truncated or altered.
    """
    if not isinstance(path, str | PathLike):
        raise BundleError(f"the bundle is given as {type(path).__name__}, expected the path of its folder")
    folder = Path(path)
    if not folder.is_dir():
        kind = "a file" if folder.is_file() else "nothing"
        raise BundleError(f"{folder}: found {kind}, expected a bundle (a folder); make one with `txl-deploy export`")
    manifest_path = folder / MANIFEST
    try:
        data = manifest_path.read_bytes()
    except FileNotFoundError:
        raise BundleError(
            f"{folder}: no {MANIFEST} in it, expected a bundle; make one with `txl-deploy export`"
        ) from None
    except OSError as error:
        raise BundleError(f"{manifest_path}: {error.strerror}; expected a readable manifest") from None
    manifest = decode_manifest(data, str(manifest_path))
    bundle = Bundle(folder, manifest, verify_files)
    for name in manifest.files:
        if not name.startswith(ENGINES):
            bundle.check(name)
    return bundle


def _check_file(folder: Path, name: str, size: int, sha256: str | None) -> None:
    path = folder / name
    engine = name.startswith(ENGINES)
    advice = f"{'build it with `txl-deploy build`' if engine else 'export the model'} again, or copy the bundle again"
    try:
        if not path.is_file():
            raise BundleError(f"{path}: missing, expected a file of {size} bytes; {advice}")
        if not path.resolve().is_relative_to(folder.resolve()):
            raise BundleError(f"{path}: a link that leaves the bundle, expected a plain file; {advice}")
        found = path.stat().st_size
        if found != size:
            raise BundleError(f"{path}: {found} bytes, expected {size}; {advice}")
        if sha256 is not None and file_sha256(path) != sha256:
            raise BundleError(f"{path}: its SHA-256 is not the manifest's, the file was altered; {advice}")
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}; expected a readable file; {advice}") from None
