"""The files torch.save and pickle.dump write: where a pickle and its storages lie.

Every size is checked against the file before memory is taken for it.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from txl_runtime.errors import CheckpointError

from txl_export.checkpoints.files.pickle_names import shown
from txl_export.checkpoints.files.rebuilding import Builder, Storage, Written
from txl_export.checkpoints.files.torchscript import CONTAINER as SCRIPTED

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C  # how the legacy container begins, as a pickled integer
MAGIC_BYTES = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
PROTOCOL = 1001
File: TypeAlias = io.BufferedReader | io.BytesIO
LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip entry: signature, …, lengths of the name and of the extra field
SAVE_AGAIN = "save it again with torch.save(model.state_dict(), path)"
_OTHERS = {
    "a TorchScript archive of torch < 1.4": r"[^/]+/model\.json$",
    "a program of torch.export": r"[^/]+/models/.*\.json|serialized_exported_program",
}
"""What else torch writes as a zip archive, and how the name of one of its entries begins."""
_CODE = r"[^/]+/code/"
"""Entries of a TorchScript archive that may be compressed, because they are never opened."""
MOST = 1 << 27
"""Bytes of a program; a vocabulary of 800,000 words in an NVIDIA checkpoint takes 40 MB."""
DAMAGED = "cut short or damaged; copy the file again"


class ZipFile:
    """The container torch ≥ 1.6 writes, an uncompressed zip archive: zipfile reads its directory, nothing else.

    Attributes:
        scripted: whether it is a TorchScript archive: beside the pickle it holds code, which is never opened.
        constants: how many tensors of that code lie beside it, which have no names.
        name: of the container.
        programs: how many pickles there are.
    """

    programs = 1

    def __init__(self, file: File, size: int) -> None:
        self._file = file
        self._entries = _zip_entries(file, size)
        programs = [name for name in self._entries if name.endswith("/data.pkl") and name.count("/") == 1]
        if not programs and "policy.pth" in self._entries:
            raise CheckpointError(
                "this is an archive of Stable-Baselines3, whose policy no config builds; load it in Python, "
                'policy = RecurrentPPO.load(path).policy, and export txl_export.adapt("recurrent-policy", policy), or '
                "save policy.state_dict() for a module of your own"
            )
        if len(programs) != 1:
            raise CheckpointError(
                f"this is a zip archive with {len(programs)} data.pkl, expected one as torch.save writes; {SAVE_AGAIN}"
            )
        self._program = programs[0]
        self._root = root = programs[0].removesuffix("data.pkl")
        self.scripted = any(name == f"{root}constants.pkl" or name.startswith(f"{root}code/") for name in self._entries)
        constants = [entry for name, entry in self._entries.items() if name.startswith(f"{root}constants/")]
        self.constants = sum(entry.length > 0 for entry in constants)
        self.name = SCRIPTED if self.scripted else "torch zip"
        if f"{self._root}byteorder" in self._entries and self._read(f"{self._root}byteorder", 16) != b"little":
            raise CheckpointError(f"saved on a big-endian machine; load it there and {SAVE_AGAIN} on another")

    def program(self) -> bytes:
        """The pickle.

        Raises:
            CheckpointError: it is too large, or its checksum is wrong.
        """
        return self._read(self._program, MOST)

    def content(self, written: Written, aliases: Mapping[str, str]) -> Any:
        """The content, of what the program makes.

        Raises:
            CheckpointError: it is damaged, or refers to what the archive does not hold.
        """
        return Builder(written.blob, self._storage, aliases).plain(sound(written)[0])

    def _storage(self, key: str, dtype: torch.dtype, count: int) -> Tensor:
        entry = self._entries.get(f"{self._root}data/{key}")
        if entry is None or entry.length != count * dtype.itemsize:
            found = "there is none" if entry is None else f"the file has {entry.length} bytes"
            raise CheckpointError(
                f"storage {shown(key)} of {count} × {dtype}: {found}; the file is damaged, copy it again"
            )
        elements = _allocate(entry.length)
        self._file.seek(entry.offset)
        _fill(elements, self._file)
        entry.check(zlib.crc32(elements.numpy().data))
        return elements.view(dtype)

    def _read(self, name: str, limit: int) -> bytes:
        entry = self._entries[name]
        if entry.length > limit:
            raise CheckpointError(f"{shown(name)} has {entry.length} bytes, expected at most {limit}")
        self._file.seek(entry.offset)
        data = self._file.read(entry.length)
        entry.check(zlib.crc32(data))
        return data


class _Entry(NamedTuple):
    """Where an entry of a zip archive lies: its name, first byte, length and checksum."""

    name: str
    offset: int
    length: int
    crc: int

    def check(self, crc: int) -> None:
        # torch writes 0 where it was told to leave checksums out.
        if self.crc not in (0, crc):
            raise CheckpointError(f"the checksum of {shown(self.name)} is wrong; the file is {DAMAGED}")


def _zip_entries(file: File, size: int) -> dict[str, _Entry]:
    """The entries of a zip archive that do not overlap and lie inside the file; all but code are uncompressed.

    Raises:
        CheckpointError: the archive is anything else.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            infos, directory = archive.infolist(), archive.start_dir
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, OSError, struct.error):
        raise CheckpointError(f"the zip archive has no directory; the file is {DAMAGED}") from None
    for kind, mark in _OTHERS.items():  # before the rest: they compress some of their entries
        if any(re.match(mark, info.filename) for info in infos):
            raise CheckpointError(f"this is {kind}, expected a checkpoint; {SAVE_AGAIN} where it was trained")
    entries: dict[str, _Entry] = {}
    end = 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        name = shown(info.filename)
        stored = info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size
        if not (stored or re.match(_CODE, info.filename)) or info.flag_bits & 1:
            raise CheckpointError(
                f"{name} in the zip archive is compressed or encrypted, which torch.save never does; {SAVE_AGAIN}"
            )
        if info.header_offset < end or info.header_offset + LOCAL_HEADER.size > size:
            raise CheckpointError(f"{name} in the zip archive overlaps another entry; the file is {DAMAGED}")
        file.seek(info.header_offset)
        signature, name_length, extra_length = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
        offset = info.header_offset + LOCAL_HEADER.size + name_length + extra_length
        end = offset + info.compress_size
        if signature != b"PK\x03\x04" or end > min(directory, size) or info.filename in entries:
            raise CheckpointError(f"{name} in the zip archive is not where it should be; the file is {DAMAGED}")
        entries[info.filename] = _Entry(info.filename, offset, info.compress_size, info.CRC)
    return entries


class LegacyFile:
    """The container torch ≤ 1.5 writes. A storage is promised by the pickle and only filled after it."""

    name, programs = "torch legacy", 5

    def __init__(self, file: File, size: int) -> None:
        self._file, self._size = file, size
        self._storages: dict[str, tuple[int, Tensor]] = {}
        self._promised = 0

    def program(self) -> bytes:
        """Bytes that begin with the pickles: magic number, protocol, sizes of integers, content, keys of storages."""
        self._file.seek(0)
        return self._file.read(min(self._size, MOST))

    def content(self, written: Written, aliases: Mapping[str, str], bare: bool = False) -> Any:
        """The content, of what the programs make; with `bare` it is one storage.

        Raises:
            CheckpointError: they are damaged, or the file does not hold what they promise.
        """
        for found, expected in zip(written.contents, (MAGIC_NUMBER, PROTOCOL), strict=False):
            if found != expected:
                what = "no magic number" if expected == MAGIC_NUMBER else f"not protocol {PROTOCOL}"
                raise CheckpointError(f"{what}, expected a file by torch.save; the file is {DAMAGED}")
        contents, builder = sound(written), Builder(written.blob, self._storage, aliases)
        content, keys = (builder.storage if bare else builder.plain)(contents[3]), builder.plain(contents[4])
        if type(keys) is not list or not all(type(key) is str for key in keys) or len(set(keys)) < len(keys):
            raise CheckpointError(f"the list of storages is no list of names; the file is {DAMAGED}")
        if set(keys) != set(self._storages):
            raise CheckpointError(
                f"{len(keys)} storages are listed and {len(self._storages)} used, or others; the file is {DAMAGED}"
            )
        self._file.seek(written.end)
        for key in keys:
            count, elements = self._storages[key]
            if self._file.read(8) != struct.pack("<q", count):
                raise CheckpointError(f"storage {shown(key)} does not have {count} elements; the file is {DAMAGED}")
            _fill(elements, self._file)
        return content

    def _storage(self, key: str, dtype: torch.dtype, count: int) -> Tensor:
        """Room for a storage [count], filled by `load` when the pickle has ended."""
        length = count * dtype.itemsize
        self._promised += length
        if self._promised > self._size:
            raise CheckpointError(
                f"storage {shown(key)} of {count} × {dtype} does not fit into the {self._size} bytes of the file; "
                f"the file is {DAMAGED}"
            )
        elements = _allocate(length)
        self._storages[key] = count, elements
        return elements.view(dtype)


class PlainPickle:
    """What pickle.dump writes: every storage is a call with a legacy file that holds nothing else."""

    name, programs = "pickle", 1

    def __init__(self, file: File, size: int) -> None:
        self._file, self._size = file, size

    def program(self) -> bytes:
        """The file."""
        self._file.seek(0)
        return self._file.read(self._size)

    def content(self, written: Written, aliases: Mapping[str, str]) -> Any:
        """The content, of what the program makes.

        Raises:
            CheckpointError: it is damaged, or holds a storage in another way.
        """

        def nested(contents: list[Any], behind: bytes) -> Storage:
            file = LegacyFile(io.BytesIO(behind), len(behind))
            found: Storage = file.content(Written(contents, "", 0, [], b""), {}, bare=True)
            return found

        return Builder(written.blob, LegacyFile(io.BytesIO(), 0)._storage, aliases, nested).plain(sound(written)[0])


def sound(written: Written) -> list[Any]:
    """The contents.

    Raises:
        CheckpointError: something is wrong with one of the programs.
    """
    if written.error:
        raise CheckpointError(written.error)
    return written.contents


def _allocate(length: int) -> Tensor:
    """Bytes for a storage; only ever called with a length that was compared with the file's."""
    try:
        return torch.empty(length, dtype=torch.uint8)
    except RuntimeError:
        raise MemoryError from None


def _fill(elements: Tensor, file: File) -> None:
    if file.readinto(elements.numpy().data) != elements.numel():
        raise CheckpointError(f"a storage ends with the file; the file is {DAMAGED}")
