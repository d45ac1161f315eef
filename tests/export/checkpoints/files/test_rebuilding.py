"""NumPy's numbers and arrays in pickles become plain numbers and tensors; what lies about its size is refused."""

from __future__ import annotations

import pickle  # noqa: TID251 - the tests write what others wrote with it
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pickle_programs import binary, call, code, name, program, refused, storage, tensor, write_zip
from txl_export.checkpoints.files.loading import load_file
from txl_export.checkpoints.files.pickle_names import Stub
from txl_export.checkpoints.plain_weights import read_stored
from txl_runtime.errors import CheckpointError

ARRAYS = {
    "float32": np.arange(6, dtype=np.float32).reshape(2, 3),
    "float16": np.ones((2, 1, 2), np.float16),
    "whole numbers": np.arange(-3, 3, dtype=np.int16),
    "bytes": np.arange(256, dtype=np.uint8),
    "truth": np.array([[True, False]]),
    "columns first": np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
    "a part of another": np.arange(24.0).reshape(4, 6)[1:3, ::2],
    "without axes": np.array(2.5),
    "empty": np.zeros((0, 3), np.int64),
}


def read(path: Path, content: Any, protocol: int) -> Any:
    path.write_bytes(pickle.dumps(content, protocol))
    return read_stored(path)


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_is_a_tensor(tmp_path, kind, protocol):
    found = read(tmp_path / "a.pkl", {"a": ARRAYS[kind]}, protocol)["a"]
    expected = torch.from_numpy(np.ascontiguousarray(ARRAYS[kind]).reshape(ARRAYS[kind].shape))
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_numbers_are_plain_at_every_depth(tmp_path, protocol):
    content = {"rate": np.float32(0.25), "sizes": [np.int64(3), (np.bool_(True), {"deep": np.float64(-1e300)})]}
    found = read(tmp_path / "a.pkl", content, protocol)
    assert found == {"rate": 0.25, "sizes": [3, (True, {"deep": -1e300})]}
    assert [type(found["rate"]), type(found["sizes"][0]), type(found["sizes"][1][0])] == [float, int, bool]


@pytest.mark.parametrize("array", [np.array(["text"]), np.array([1.0], ">f4"), np.array([None]), np.array([1j])])
def test_what_has_no_tensor_stays_a_stand_in(tmp_path, array):
    assert isinstance(read(tmp_path / "a.pkl", {"a": array}, 4)["a"], Stub)


@pytest.mark.parametrize("shape", [(3,), (2, 2), (1 << 61, 1 << 61), (-1,), (0,), "ab", (True,)])
def test_a_shape_that_does_not_fit_its_bytes_is_refused(tmp_path, shape):
    kind = name("numpy.dtype") + code(("f4", False, True)) + b"R" + code((3, "<")) + b"b"
    made = name("numpy._core.multiarray._reconstruct") + b")R" + code((1, shape, kind, False, binary(bytes(8)))) + b"b"
    given = name("numpy._core.numeric._frombuffer") + code((binary(bytes(8)), kind, shape, "C")) + b"R"
    for body in (made, given):
        (tmp_path / "a.pkl").write_bytes(program(body, 4))
        with pytest.raises(CheckpointError, match=re.compile("damaged")):
            read_stored(tmp_path / "a.pkl")


def test_a_tensor_is_no_list_of_its_numbers(tmp_path):
    """A set of one with 20,000, made 200 times over by 23 KB, was 4,000,000 tensors."""
    whole = tensor(storage(4, kind="torch.ByteStorage"))
    for function in ("builtins.set", "builtins.frozenset", "collections.OrderedDict", "collections.Counter"):
        write_zip(tmp_path / "a.pt", call(function, whole), bytes(4))
        refused(tmp_path / "a.pt", rf"calls {function} with what it does not take")


def test_sizes_beside_a_zero_are_not_too_large_to_be_multiplied(tmp_path):
    write_zip(tmp_path / "a.pt", tensor(size=(2**40, 2**40, 0), stride=(1, 1, 1)))
    refused(tmp_path / "a.pt", r"\(1099511627776, 1099511627776, 0\) with stride \(1, 1, 1\) at 0 does not fit")
    write_zip(tmp_path / "a.pt", tensor(size=(2**20, 2**20, 0), stride=(1, 1, 1)))
    assert load_file(tmp_path / "a.pt").content.shape == (2**20, 2**20, 0)


def test_a_long_name_counts_each_time_that_it_is_referred_to(tmp_path):
    """Two bytes stand for 6,000 of JSON."""
    body = b"(" + name("m." + "\U0001f600" * 500) + b"q\x01" + b"h\x01" * 16_000 + b"l"
    write_zip(tmp_path / "a.pt", body)
    refused(tmp_path / "a.pt", "the content stands for more than")
