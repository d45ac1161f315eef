"""Stored vectors, of either form, in a bundle whose manifest has the right size and hash of them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import txl_runtime
from mutated_states import joined, split
from safetensors.numpy import save
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.errors import TxlError
from txl_runtime.selftest import run_selftest

from fuzz.choices import Choices
from fuzz.targets.places import BASES, folder

NAMES = ("length", "counts", "reset", "input/features", "output/values", "place/values", "state/hidden", "state/count")
NAMES += ("state_place/hidden", "state_shape/hidden", "reached", "tokens", "positions", "columns", "logprobs", "x", "")
FORMS = ("selftest.npz", "selftest.safetensors")
KEPT = ("step-1.onnx", "weights.safetensors")
KINDS = ("<f4", "<i4", "|b1", "<i8", "<f8", "|O", "<U4", ">i4", "<c8", "<M8[s]", "|V3", "|S0", "<f2", "(2,)<f4", "x")
SIZES = ((), (0,), (1,), (2,), (4, 2), (4, 2, 3), (1 << 40,), (-1,), (2,) * 70, (1 << 20, 0), (3, 1, 1))


def one_input(data: bytes) -> None:
    """Read a file, as it is or put together; it may hold as many bytes as the file, more or less."""
    choices = Choices(data)
    match choices.number(2):
        case 0:
            data = choices.rest()
            for name in FORMS:
                with contextlib.suppress(TxlError):
                    _read(data, name)
            _read(data, FORMS[data[:2] != b"PK"])
        case 1:
            _read(_archive(choices), FORMS[0])
        case _:
            _read(_tensors(choices), FORMS[1])


def _read(content: bytes, name: str) -> None:
    bundle = open_bundle(_bundle(content, name))
    vectors = bundle.selftest()
    held = sum(array.nbytes for array in vectors.values())
    most = 4096 * len(content) + (1 << 24) if name == FORMS[0] else len(content)
    assert held <= most, f"{held} bytes of vectors from {len(content)}"
    assert all(isinstance(array, np.ndarray) and array.dtype != object for array in vectors.values())
    model = _model()
    vars(model)["bundle"] = bundle
    run_selftest(model)


def seeds() -> Iterator[bytes]:
    """The good vectors in both forms, and files of single arrays."""
    yield b"\0" + (BASES / "step" / "selftest.npz").read_bytes()
    yield b"\0" + save(_good())
    for number in range(len(KINDS)):
        yield bytes([1, 2, number, number, number % 11, 8]) + b"\1" * 8 + bytes([number + 1, 0, 3, 0])
    yield b"\1" + bytes(range(64))
    yield b"\2"
    yield b"\2" + bytes(range(64))


@cache
def _good() -> dict[str, np.ndarray]:
    with np.load(BASES / "step" / "selftest.npz") as good:
        return dict(good)


def _tensors(choices: Choices) -> bytes:
    """The good arrays, some of them replaced, others with another type, shape or place in the header."""
    arrays = dict(_good())
    for _ in range(choices.number(2)):
        values: Any = np.full(choices.pick(((), (1,), (4,), (4, 2), (4, 2, 3), (0,))), choices.number(255) - 128)
        arrays[choices.pick(NAMES)] = values.astype(choices.pick(("f4", "i4", "?", "i8", "f8", "u1", "f2")))
    header, body = split(save(arrays))
    for _ in range(choices.number(3)):
        entry = header[choices.pick(sorted(header))]
        match choices.number(2):
            case 0:
                entry["dtype"] = choices.pick(("F32", "I32", "I64", "BOOL", "BF16", "C64", ""))
            case 1:
                entry["shape"] = list(choices.pick(SIZES))
            case _:
                entry["data_offsets"][choices.number(1)] += choices.number(255) - 128
    written = bytearray(joined(header, body))
    for _ in range(choices.number(3)):
        written[choices.number(len(written) - 1)] = choices.number(255)
    return bytes(written)


def _archive(choices: Choices) -> bytes:
    """The good arrays, some of them replaced: other types, other shapes, other numbers of bytes, other checksums."""
    file = io.BytesIO()
    arrays: dict[str, bytes] = {}
    for name, values in _good().items():
        inner = io.BytesIO()
        np.save(inner, values)
        arrays[f"{name}.npy"] = inner.getvalue()
    for _ in range(choices.number(4)):
        name = f"{choices.pick(NAMES)}.npy"
        match choices.number(4):
            case 0:
                arrays.pop(name, None)
            case 1:
                arrays[name] = choices.some()
            case 2:
                facts = {"descr": choices.pick(KINDS), "fortran_order": choices.flag(), "shape": choices.pick(SIZES)}
                text = repr(facts).encode() + b"\n"
                arrays[name] = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + choices.some(63)
            case 3:
                odd: Any = np.full(choices.pick(((), (1,), (4,), (4, 2), (4, 2, 3))), choices.number(255) - 128)
                inner = io.BytesIO()
                np.save(inner, odd.astype(choices.pick(("f4", "i4", "?", "i8", "f8"))))
                arrays[name] = inner.getvalue()
            case _:
                arrays[name] = arrays.get(f"{choices.pick(NAMES)}.npy", b"")
    with zipfile.ZipFile(file, "w", choices.pick((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for name, content in arrays.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    written = bytearray(file.getvalue())
    for _ in range(choices.number(3)):
        written[choices.number(len(written) - 1)] = choices.number(255)
    return bytes(written)


def _bundle(content: bytes, name: str) -> Path:
    """The step's bundle with other vectors."""
    path = folder() / "step.txl"
    if not path.exists():
        shutil.copytree(BASES / "step", path)
    (path / name).write_bytes(content)
    manifest = json.loads((BASES / "step" / "manifest.json").read_text("utf-8"))
    manifest["selftest"] = name
    manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["files"] = {file: record for file, record in manifest["files"].items() if file in (name, *KEPT)}
    (path / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    return path


@cache
def _model() -> txl_runtime.Model:
    return txl_runtime.load(BASES / "step", backend="cpu", threads=1)
