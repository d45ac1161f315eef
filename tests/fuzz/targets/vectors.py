"""Stored vectors, selftest.npz, in a bundle whose manifest has the right size and hash of them."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import txl_runtime
from txl_runtime.bundle import folder as folders
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.selftest import run_selftest

from fuzz.choices import Choices
from fuzz.targets.places import BASES, folder

NAMES = ("length", "counts", "reset", "input/features", "output/values", "place/values", "state/hidden", "state/count")
NAMES += ("state_place/hidden", "state_shape/hidden", "reached", "tokens", "positions", "columns", "logprobs", "x", "")
KINDS = ("<f4", "<i4", "|b1", "<i8", "<f8", "|O", "<U4", ">i4", "<c8", "<M8[s]", "|V3", "|S0", "<f2", "(2,)<f4", "x")
SIZES = ((), (0,), (1,), (2,), (4, 2), (4, 2, 3), (1 << 40,), (-1,), (2,) * 70, (1 << 20, 0), (3, 1, 1))


def one_input(data: bytes) -> None:
    """Read an archive, as it is or put together; it may hold as many bytes as the file, more or less."""
    choices = Choices(data)
    archive = choices.rest() if choices.number(2) == 0 else _archive(choices)
    with mock.patch.object(folders, "TICK", 0):  # nobody replaces this bundle: nothing has to settle
        bundle = open_bundle(_bundle(archive))
    vectors = bundle.selftest()
    held = sum(array.nbytes for array in vectors.values())
    assert held <= 4096 * len(archive) + (1 << 24), f"{held} bytes of vectors from {len(archive)}"
    assert all(isinstance(array, np.ndarray) and array.dtype != object for array in vectors.values())
    model = _model()
    vars(model)["bundle"] = bundle
    run_selftest(model)


def seeds() -> Iterator[bytes]:
    """The good vectors, and archives of single arrays."""
    yield b"\0" + (BASES / "step" / "selftest.npz").read_bytes()
    for number in range(len(KINDS)):
        yield bytes([1, 2, number, number, number % 11, 8]) + b"\1" * 8 + bytes([number + 1, 0, 3, 0])
    yield b"\2" + bytes(range(64))


def _archive(choices: Choices) -> bytes:
    """The good arrays, some of them replaced: other types, other shapes, other numbers of bytes, other checksums."""
    file = io.BytesIO()
    arrays: dict[str, bytes] = {}
    with np.load(BASES / "step" / "selftest.npz") as good:
        for name in good.files:
            inner = io.BytesIO()
            np.save(inner, good[name])
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
                values: Any = np.full(choices.pick(((), (1,), (4,), (4, 2), (4, 2, 3))), choices.number(255) - 128)
                inner = io.BytesIO()
                np.save(inner, values.astype(choices.pick(("f4", "i4", "?", "i8", "f8"))))
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


def _bundle(archive: bytes) -> Path:
    """The step's bundle with other vectors."""
    path = folder() / "step.txl"
    if not path.exists():
        shutil.copytree(BASES / "step", path)
    (path / "selftest.npz").write_bytes(archive)
    manifest = json.loads((BASES / "step" / "manifest.json").read_text("utf-8"))
    manifest["files"]["selftest.npz"] = {"size": len(archive), "sha256": hashlib.sha256(archive).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    return path


@cache
def _model() -> txl_runtime.Model:
    return txl_runtime.load(BASES / "step", backend="cpu", threads=1)
