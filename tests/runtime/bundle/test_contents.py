"""Stored vectors and other contents of a bundle: what is read takes at most a stated multiple of its size."""

from __future__ import annotations

import io
import struct
import sys
import tracemalloc
import zipfile
from typing import Any

import numpy as np
import pytest
from mutated_states import joined
from safetensors.numpy import save
from txl_runtime.bundle.contents import EXPANDED, SMALL, decode_report, decode_vectors, read_tensors
from txl_runtime.errors import BundleError

TENSORS = "selftest.safetensors"


def packed(*members: tuple[str, bytes], kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", kind) as made:
        for name, data in members:
            made.writestr(name, data)
    return stream.getvalue()


def npy(header: object, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    said = header if isinstance(header, bytes) else repr(header).encode()
    size = struct.pack("<H" if version[0] == 1 else "<I", len(said) + 1)
    return b"\x93NUMPY" + version + size + said + b"\n" + data


def plain(shape: object, descr: object = "<f4", fortran: object = False) -> dict[str, Any]:
    return {"descr": descr, "fortran_order": fortran, "shape": shape}


def vectors(data: bytes, name: str = "selftest.npz") -> dict[str, Any]:
    return decode_vectors(data, name)


def most_memory(data: bytes, name: str = "selftest.npz") -> int:
    """Bytes that reading takes at its worst, whether it is refused or not."""
    tracemalloc.start()
    try:
        vectors(data, name)
    except BundleError:
        pass
    finally:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return most


GIVEN = {
    "rows": np.arange(6, dtype=np.int32).reshape(2, 3),
    "memory/layers.00.key": np.arange(6, dtype=np.float64).reshape(2, 3),
    "none": np.zeros((0, 3), np.float32),
    "one": np.array(True),
    "place": np.array([2**40], np.int64),
}


def test_vectors_are_read_as_numpy_wrote_them():
    stream = io.BytesIO()
    given = {**GIVEN, "columns": np.asfortranarray(np.arange(6).reshape(2, 3))}
    np.savez_compressed(stream, allow_pickle=False, **given)
    found = vectors(stream.getvalue())
    assert list(found) == list(given)
    for name, array in given.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_vectors_are_read_as_safetensors_wrote_them():
    found = vectors(save(GIVEN), TENSORS)
    assert found.keys() == GIVEN.keys()
    for name, array in GIVEN.items():
        assert found[name].shape == array.shape
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def tensors(dtype: str, shape: list[Any], data: bytes, end: int | None = None) -> bytes:
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data) if end is None else end]}
    return joined({"a": entry}, data)


BAD_TENSORS: dict[str, bytes] = {
    "no file at all": b"",
    "an archive": packed(("a.npy", npy(plain((1,)), bytes(4)))),
    "a header that is longer than the file": (2**40).to_bytes(8, "little") + b"{}",
    "more than there is": tensors("F32", [2**40], b"", 2**42),
    "sizes beyond any number": tensors("F32", [2**61, 2**61], b""),
    "a negative size": tensors("F32", [-1], b""),
    "less than there is": tensors("F32", [1], bytes(8), 4),
    "half precision of another kind": tensors("BF16", [2], bytes(4)),
    "a truth that is 2": tensors("BOOL", [1], b"\2"),
    "an array that is not counted": tensors("F32", [1], bytes(8)),
}


@pytest.mark.parametrize("data", BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_tensors_that_are_no_vectors_are_refused_without_memory(data):
    with pytest.raises(BundleError, match=r"selftest\.safetensors: .+; expected stored vectors; export"):
        vectors(data, TENSORS)
    assert most_memory(data, TENSORS) < 1 << 20


def test_many_tensors_take_memory_as_their_file_does():
    data = save({str(number): np.zeros(0, np.float32) for number in range(20_000)})
    assert len(data) > 1 << 20
    assert len(vectors(data, TENSORS)) == 20_000
    assert most_memory(data, TENSORS) < EXPANDED * len(data)


ZEROS = bytes(SMALL)
BAD: dict[str, bytes] = {
    "no archive": npy(plain((1,)), bytes(4)),
    "a pickle": b"\x80\x04N.",
    "an object": packed(("a.npy", npy(plain((1,), "|O"), b"\x80\x04N."))),
    "names of fields": packed(("a.npy", npy(plain((1,), [("x", "<f4")]), bytes(4)))),
    "more than there is": packed(("a.npy", npy(plain((2**40,))))),
    "less than there is": packed(("a.npy", npy(plain((1,)), bytes(8)))),
    "a negative size": packed(("a.npy", npy(plain((-1, -1)), bytes(4)))),
    "sizes beyond any number": packed(("a.npy", npy(plain((2**63, 2**63, 0)), b""))),
    "a header that is nested": packed(("a.npy", npy(b"(" * 60_000))),
    "a header that is code": packed(("a.npy", npy(b"__import__('os')"))),
    "a header of version 2": packed(("a.npy", npy(plain((1,)), bytes(4), b"\x02\x00"))),
    "lzma": packed(("a.npy", npy(plain((1,)), bytes(4))), kind=zipfile.ZIP_LZMA),
    "a bomb": packed(("a.npy", npy(plain((SMALL // 4 + 1,)), ZEROS + bytes(4)))),
    "a bomb in parts": packed(*((f"{part}.npy", npy(plain((SMALL // 16,)), ZEROS[: SMALL // 4])) for part in range(5))),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_vectors_that_are_none_or_too_large_are_refused(data):
    with pytest.raises(BundleError, match=r"selftest\.npz: .+; expected stored vectors; export the model again"):
        vectors(data)


@pytest.mark.parametrize("name", ["a bomb", "a bomb in parts", "more than there is"])
def test_a_bomb_is_not_expanded(name):
    assert most_memory(BAD[name]) < 1 << 20


def test_members_that_share_their_bytes_are_counted_each_time():
    """A directory of the archive may name one place many times."""
    whole = packed(("a.npy", npy(plain((SMALL // 16,)), ZEROS[: SMALL // 4])))
    start = whole.index(b"PK\x01\x02")
    end = whole.index(b"PK\x05\x06")
    many = 40
    entries = whole[start:end] * many
    tail = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, many, many, len(entries), start, 0)
    data = whole[:start] + entries + tail
    with pytest.raises(BundleError, match=f"{many * (SMALL // 4 + 64)} bytes when expanded|when expanded"):
        vectors(data)
    assert most_memory(data) < 1 << 20


def test_a_size_that_is_a_lie_is_noticed():
    data = packed(("a.npy", npy(plain((1 << 18,)), bytes(1 << 20))))
    size = (len(npy(plain((1 << 18,)))) + (1 << 20)).to_bytes(4, "little")
    assert data.count(size) == 2
    with pytest.raises(BundleError):
        vectors(data.replace(size, (200).to_bytes(4, "little")))


def test_many_members_take_memory_as_their_file_does():
    data = packed(*((f"{number}.npy", npy(plain(()), bytes(4))) for number in range(500)), kind=zipfile.ZIP_STORED)
    assert len(vectors(data)) == 500
    assert most_memory(data) < EXPANDED * len(data)


def test_a_report_may_be_any_json_but_nothing_else():
    assert decode_report(b'{"passed": true}', "report.json") == {"passed": True}
    assert decode_report(b"[1]", "report.json") == {}
    for data in (b"{", b"\xff", b"[" * 100_000, b'{"a": ' + b"1" * 5000 + b"}", b'"\\ud800"'):
        with pytest.raises(BundleError, match=r"report\.json: .+; expected a report"):
            decode_report(data, "report.json")


@pytest.mark.parametrize(("dtype", "name"), [("none", "a"), ("F32", "b")])
def test_weights_that_numpy_has_no_type_for_or_that_are_not_there_are_refused(tmp_path, dtype, name):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(tensors(dtype, [1], bytes(4)))
    with pytest.raises(BundleError, match="expected the bundle's weights"):
        read_tensors(path, [name])


def test_what_is_too_large_for_a_file_is_said_in_one_line():
    with pytest.raises(BundleError) as caught:
        vectors(packed(("x" * 60_000, b"text")))
    assert len(str(caught.value)) < 500
    assert sys.getsizeof(str(caught.value)) < 5000
