"""Finds the pickle and the storages in files of torch.save and pickle.dump, with one class per kind of file.

Each size that a file names is compared with the file's own size before memory is allocated for it.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
from collections.abc import Callable
from typing import Any, BinaryIO

import torch
from torch import Tensor
from txl_runtime.errors import CheckpointError

from txl_export.checkpoints.files.pickle_names import shown
from txl_export.checkpoints.files.rebuilding import Builder, ProgramAnswer, Storage

MAGIC_NUMBER, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # first two values in a legacy file
MAGIC_BYTES = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
MOST = 1 << 27
"""Maximum number of bytes of a pickle, 128 MiB. The largest known vocabulary, 800,000 words in an NVIDIA checkpoint,
takes 40 MB."""
SCRIPTED = "TorchScript"
SAVE_AGAIN = "save it again with torch.save(model.state_dict(), path)"
DAMAGED = "cut short or damaged; copy the file again"
_OTHERS = {
    "a TorchScript archive of torch < 1.4": r"[^/]+/model\.json$",
    "a program of torch.export": r"[^/]+/models/.*\.json|serialized_exported_program",
}
"""Zip archives by torch that are no checkpoints, each with a pattern that the name of an entry in the archive
matches."""
STABLE_BASELINES = """this is an archive of Stable-Baselines3, whose policy no config builds; over Boxes, give it \
to `export` itself; else load it in Python, \
policy = RecurrentPPO.load(path).policy, and export txl_export.adapt("recurrent-policy", policy), or save \
policy.state_dict() for a module of your own"""
_CODE = r"[^/]+/code/"
"""Pattern of entries in a TorchScript archive that may be compressed, because they are never opened."""


class PlainPickle:
    """A file that pickle.dump wrote; the base class of the classes for torch's files.

    Attributes:
        name: the name of the container, e.g. "torch zip".
        programs: the number of pickles in the file.
        constants: the number of nameless tensors that belong to a TorchScript archive's code.
        most: the number of bytes from the file's beginning that may hold pickles.
    """

    name, programs, constants, most = "pickle", 1, 0, 1 << 62

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self._storages: dict[str, tuple[int, Tensor]] = {}
        self._promised = 0

    def program(self) -> bytes:
        """Return bytes that begin with the file's pickles; raise CheckpointError if they are damaged or too long."""
        self._file.seek(0)
        return self._file.read(min(self._size, self.most))

    def content(self, written: ProgramAnswer, builder: Builder) -> Any:
        """Return the content that the pickles describe; raise CheckpointError if a storage is missing."""
        content = builder.plain(written.contents[0])
        if self._storages:
            raise CheckpointError(f"its tensors lie in no file that torch.save wrote; {SAVE_AGAIN}")
        return content

    def elements(self, key: str, dtype: torch.dtype, count: int) -> Tensor:
        """Allocate a storage [count] that is filled later; raise CheckpointError if it is larger than the file.

        For example, `elements("0", torch.float32, 6)` for a tensor [2, 3].
        """
        self._promised += count * dtype.itemsize
        if self._promised > self._size:
            message = f"storage {shown(key)} of {count} × {dtype} does not fit into the {self._size} bytes of the file"
            raise CheckpointError(f"{message}; the file is {DAMAGED}")
        self._storages[key] = count, _allocated(count * dtype.itemsize)
        return self._storages[key][1].view(dtype)

    def nested(self, contents: list[Any], behind: bytes) -> Storage:
        """Return the one storage that pickle.dump wrote as a legacy torch file inside the pickle.

        Raises:
            CheckpointError: the inner file holds anything but a storage.
        """
        file = LegacyFile(io.BytesIO(behind), len(behind))
        content = file.content(ProgramAnswer(contents), Builder(b"", file.elements, {}), bare=True)
        if not isinstance(content, Storage):
            raise CheckpointError("a nested file holds no storage; the file is damaged or was made to do harm")
        return content


class ZipFile(PlainPickle):
    """A file that torch ≥ 1.6 wrote: an uncompressed zip archive."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        super().__init__(file, size)
        self._archive = _attempted("the zip archive has no directory", lambda: zipfile.ZipFile(file))
        self._entries = entries = self._archive.NameToInfo
        self._check(self._archive.infolist(), size)
        programs = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
        if not programs and "policy.pth" in entries:
            raise CheckpointError(STABLE_BASELINES)
        if len(programs) != 1:
            message = f"this is a zip archive with {len(programs)} data.pkl, expected one as torch.save writes"
            raise CheckpointError(f"{message}; {SAVE_AGAIN}")
        self._root = root = programs[0].removesuffix("data.pkl")
        scripted = any(name == f"{root}constants.pkl" or name.startswith(f"{root}code/") for name in entries)
        self.constants = sum(name.startswith(f"{root}constants/") and entries[name].file_size > 0 for name in entries)
        self.name = SCRIPTED if scripted else "torch zip"
        if f"{root}byteorder" in entries and self._read(f"{root}byteorder", 16) != b"little":
            raise CheckpointError(f"saved on a big-endian machine; load it there and {SAVE_AGAIN} on another")

    def program(self) -> bytes:
        return self._read(f"{self._root}data.pkl", MOST)

    def elements(self, key: str, dtype: torch.dtype, count: int) -> Tensor:
        name = f"{self._root}data/{key}"
        length = self._entries[name].file_size if name in self._entries else "no"
        if length != count * dtype.itemsize:
            raise CheckpointError(
                f"storage {shown(key)} of {count} × {dtype}: the file has {length} bytes; it is {DAMAGED}"
            )
        elements = _allocated(count * dtype.itemsize)
        with _attempted(name, lambda: self._archive.open(name)) as entry:
            _attempted(name, lambda: _fill(elements, entry))
        return elements.view(dtype)

    def _read(self, name: str, limit: int) -> bytes:
        if (length := self._entries[name].file_size) > limit:
            raise CheckpointError(f"{shown(name)} has {length} bytes, expected at most {limit}")
        return bytes(_attempted(name, lambda: self._archive.read(name)))

    def _check(self, infos: list[zipfile.ZipInfo], size: int) -> None:
        """Check that all entries except code are uncompressed, and that together they are no larger than the file."""
        # checked first, because these archives have compressed entries, which the loop below refuses in other words
        for kind, mark in _OTHERS.items():
            if any(re.match(mark, info.filename) for info in infos):
                raise CheckpointError(f"this is {kind}, expected a checkpoint; {SAVE_AGAIN} where it was trained")
        for info in infos:
            stored = info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size
            if not (stored or re.match(_CODE, info.filename)) or info.flag_bits & 1:
                message = f"{shown(info.filename)} in the zip archive is compressed or encrypted"
                raise CheckpointError(f"{message}, which torch.save never does; {SAVE_AGAIN}")
            info.CRC = info.CRC or None  # type: ignore[assignment] # 0: torch left the checksum out; compare nothing
        if sum(info.compress_size for info in infos) > size or len(self._entries) < len(infos):
            raise CheckpointError(f"entries of the zip archive overlap, or have one name; the file is {DAMAGED}")


class LegacyFile(PlainPickle):
    """A file that torch ≤ 1.5 wrote: five pickles, then the storages that they refer to.

    The pickles are a magic number, the protocol, sizes of integers, the content, and the keys of the storages in order.
    """

    name, programs, most = "torch legacy", 5, MOST

    def content(self, written: ProgramAnswer, builder: Builder, bare: bool = False) -> Any:
        """Return the content as `PlainPickle.content` does; with `bare` the content itself may be a storage."""
        magic, protocol, _, content, listed = written.contents
        if (magic, protocol) != (MAGIC_NUMBER, PROTOCOL):
            raise CheckpointError(f"no magic number, or not protocol {PROTOCOL}, as torch.save writes; it is {DAMAGED}")
        result, keys = (builder.any if bare else builder.plain)(content), builder.plain(listed)
        if type(keys) is not list or {*map(type, keys)} - {str} or sorted(keys) != sorted(self._storages):
            raise CheckpointError(f"the storages that are used are not those that are listed; the file is {DAMAGED}")
        self._file.seek(written.end)
        for key in keys:
            count, elements = self._storages[key]
            if self._file.read(8) != struct.pack("<q", count):
                raise CheckpointError(f"storage {shown(key)} does not have {count} elements; the file is {DAMAGED}")
            _fill(elements, self._file)
        return result


def _attempted(what: str, read: Callable[[], Any]) -> Any:
    """Call `read`, a call of `zipfile`; raise CheckpointError for the many errors that damaged archives lead to."""
    try:
        return read()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, OSError, EOFError, struct.error):
        raise CheckpointError(f"{shown(what)} cannot be read; the file is {DAMAGED}") from None


def _allocated(length: int) -> Tensor:
    """Return uninitialised bytes [length] for a storage; the caller has checked that the file is as long."""
    try:
        return torch.empty(length, dtype=torch.uint8)
    except RuntimeError:
        raise MemoryError from None


def _fill(elements: Tensor, file: Any) -> None:
    room = elements.numpy().data
    for at in range(0, len(room), 1 << 24):
        if file.readinto(room[at : at + (1 << 24)]) != len(room[at : at + (1 << 24)]):
            raise CheckpointError(f"a storage ends with the file; the file is {DAMAGED}")
