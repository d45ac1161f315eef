"""Whole files: zip archives and what torch ≤ 1.5 wrote, plain pickles, safetensors, and everything that is none."""

from __future__ import annotations

import io
import json
import pickle  # noqa: TID251 - seeds are what others wrote with it
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Iterator

import numpy as np
import torch
from pickle_programs import in_one_process
from safetensors.torch import save as save_safetensors
from torch import Tensor
from txl_export.checkpoints.files.loading import load_file, scan_globals
from txl_export.checkpoints.plain_weights import read_stored, read_weights
from txl_export.checkpoints.vocabularies import read_vocabulary_file
from txl_runtime.errors import CheckpointError

from fuzz.choices import Choices
from fuzz.guard import message_problem
from fuzz.targets.places import FIXTURES, written
from fuzz.targets.unpickler import scripted

NAMES = ("a/data.pkl", "a/data/0", "a/data/1", "a/version", "a/byteorder", "data.pkl", "b/data.pkl", "a/constants.pkl")
NAMES += ("a/code/x", "policy.pth", "../x", "/x", "", "a/data/", "a/.data/serialization_id", "a/data/0\0", "é")


def one_input(data: bytes) -> None:
    """Read a file that is given as it is, or put together so that its checksums and lengths are right."""
    choices = Choices(data)
    match choices.number(3):
        case 1:
            file = _zip(choices)
        case 2:
            file = _safetensors(choices)
        case 3:
            file = _legacy(choices)
        case _:
            file = choices.rest()
    path = written("file.pt", file)
    errors: dict[str, CheckpointError] = {}
    for read in (load_file, read_stored, read_weights, scan_globals, read_vocabulary_file):
        try:
            with in_one_process():
                found = read(path)
        except CheckpointError as error:
            errors[read.__name__] = error
        else:
            if read is load_file:
                held = _tensor_bytes(found.content)
                assert held <= len(file), f"{held} bytes of tensors from a file of {len(file)}"
    for error in errors.values():
        assert message_problem(error) is None, message_problem(error)
    if "load_file" in errors:
        raise errors["load_file"]


def seeds() -> Iterator[bytes]:
    """One of each container."""
    tensors = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.zeros(2)}
    for zipped in (True, False):
        file = io.BytesIO()
        torch.save(tensors, file, _use_new_zipfile_serialization=zipped)
        yield b"\0" + file.getvalue()
    yield b"\0" + scripted()
    yield b"\0" + save_safetensors(tensors)
    yield b"\0" + pickle.dumps({"a": np.zeros(3, np.float32), "b": [1, 2]}, 4)
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("storages"))
    yield b"\0" + tar.getvalue()
    for start in (b"\x89HDF", b"\x1f\x8b", b"PK", b"version https://git-lfs", b"text \xc3", b"\x80\x02.", b"\x08onnx"):
        yield b"\0" + start
    oracle = FIXTURES / "oracle" / "kimiyoung"
    yield b"\0" + min(oracle.glob("*.zip213.pt"), key=lambda path: path.stat().st_size).read_bytes()[: 1 << 15]
    program = pickle.dumps({"a": 1}, 2)
    yield b"\1\2\0" + bytes([len(program)]) + program + b"\1\4\0\0\0\0"
    yield b"\2" + b"\1\0" * 20
    yield b"\3" + bytes([len(program)]) + program + b"\2\0\1"


def _tensor_bytes(content: object) -> int:
    """Bytes of the storages of all tensors; views of one storage count once."""
    seen: dict[int, int] = {}
    waiting, walked = [content], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict | list | tuple) and id(value) not in walked:
            walked.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value
    return sum(seen.values())


def _zip(choices: Choices) -> bytes:
    """An archive whose directory and checksums are right, until the last decisions say otherwise."""
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as archive:
        warnings.simplefilter("ignore")  # a name may stand there twice
        for _ in range(choices.number(6)):
            kind = zipfile.ZIP_DEFLATED if choices.number(7) == 7 else zipfile.ZIP_STORED
            info = zipfile.ZipInfo(choices.pick(NAMES))
            info.compress_type = kind
            info.extra = choices.some(15) if choices.number(7) == 7 else b""
            try:
                archive.writestr(info, choices.some())
            except (ValueError, RuntimeError, struct.error):
                return file.getvalue()
    data = bytearray(file.getvalue())
    for _ in range(choices.number(3)):
        if data:
            data[choices.number(len(data) - 1)] = choices.number(255)
    return bytes(data)


def _safetensors(choices: Choices) -> bytes:
    """A header of the right length over some bytes."""
    header: dict[str, object] = {"__metadata__": {"a": "b"}} if choices.flag() else {}
    at = 0
    for number in range(choices.number(4)):
        length = choices.number(64)
        shape = [choices.number(9) for _ in range(choices.number(3))]
        dtype = choices.pick(("F32", "F16", "BF16", "I64", "F8_E4M3", "BOOL", "U16", "C64", "F4", "x"))
        header[choices.pick(("a", "b", "", f"t{number}"))] = {
            "dtype": dtype,
            "shape": shape if choices.flag() else [length // 4],
            "data_offsets": [at, at + length if choices.number(7) else choices.number(1 << 40)],
        }
        at += length
    text = json.dumps(header).encode()
    return (len(text) + choices.pick((0, 0, 0, 1, 8))).to_bytes(8, "little") + text + bytes(at)


def _legacy(choices: Choices) -> bytes:
    """The five pickles and the storages behind them."""
    program = choices.some()
    keys = [str(n) for n in range(choices.number(3))]
    parts = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    parts += [program, pickle.dumps(keys, 2)]
    parts += [choices.number(16).to_bytes(8, "little") + choices.some() for _ in keys]
    return b"".join(parts)
