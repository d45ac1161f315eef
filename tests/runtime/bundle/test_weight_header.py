"""The places of tensors in a safetensors file, and files that are none."""

from __future__ import annotations

import json
import os
import sys
import threading

import numpy as np
import pytest
from safetensors.numpy import save_file
from txl_runtime.bundle.weight_header import MOST_BYTES, Entry, StoredTensor, in_order, read_header
from txl_runtime.errors import BundleError


def test_every_tensor_lies_where_the_header_says(tmp_path):
    path = tmp_path / "weights.safetensors"
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([7], np.int8), "c": np.zeros((0, 2))}
    save_file(tensors, path, metadata={"format": "pt"})
    header, data = read_header(path), path.read_bytes()
    assert set(header) == set(tensors)
    assert (header["a"].dtype, header["a"].shape) == ("F32", (2, 3))
    for name, tensor in tensors.items():
        stored = header[name]
        assert data[stored.offset : stored.offset + stored.length] == tensor.tobytes()
    assert isinstance(header["b"], StoredTensor)


def entered(first: int, last: int, data: bytes) -> bytes:
    """A file whose header gives one tensor these offsets."""
    text = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [first, last]}}).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 40,
        (5).to_bytes(8, "little") + b"[1,2]",
        *(
            len(text).to_bytes(8, "little") + text
            for text in (json.dumps({"a": entry}).encode() for entry in (1, {}, {"dtype": "F32", "shape": [1]}))
        ),
        entered(0, 4, bytes(3)),
        entered(-4, 0, bytes(4)),
        entered(4, 0, bytes(4)),
    ],
)
def test_another_file_is_refused(tmp_path, data):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(data)
    with pytest.raises(BundleError, match=r"expected the bundle's weights; export the model again"):
        read_header(path)


def test_a_header_larger_than_any_is_refused_unread(tmp_path):
    path = tmp_path / "weights.safetensors"
    with path.open("wb") as file:
        file.write((MOST_BYTES + 1).to_bytes(8, "little"))
        file.truncate(2 * MOST_BYTES)
    with pytest.raises(BundleError, match=r"its header would take 100000001 bytes; expected the bundle's weights"):
        read_header(path)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no named pipes in folders")
def test_a_pipe_is_refused_and_does_not_hang(tmp_path):
    path, told = tmp_path / "weights.safetensors", list[str]()
    os.mkfifo(path)

    def read() -> None:
        with pytest.raises(BundleError) as caught:
            read_header(path)
        told.append(str(caught.value))

    reader = threading.Thread(target=read, daemon=True)  # it must not keep the suite waiting
    reader.start()
    reader.join(20)
    assert told == [f"{path}: no plain file; expected the bundle's weights; export the model again"]


def test_a_link_to_the_weights_is_followed(tmp_path):
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "stored")
    (tmp_path / "weights.safetensors").symlink_to("stored")
    assert read_header(tmp_path / "weights.safetensors")["a"].shape == (3,)


def entry(first: int, last: int, dtype: str = "F32", shape: tuple[int, ...] = (1,)) -> Entry:
    return Entry(dtype, shape, (first, last))


def test_tensors_are_put_in_the_order_of_their_bytes():
    found = in_order({"b": entry(4, 8), "a": entry(0, 4)}, {"F32": 4}, 8)
    assert [name for name, _ in found] == ["a", "b"]


@pytest.mark.parametrize(
    ("second", "room", "said"),
    [
        (entry(0, 4), 4, r"b is F32 \[1\] at 0 … 4, expected it at 4"),
        (entry(5, 9), 9, r"b is F32 \[1\] at 5 … 9, expected it at 4"),
        (entry(4, 8, shape=(2,)), 8, r"b is F32 \[2\] at 4 … 8, expected it at 4"),
        (entry(4, 8), 12, "its tensors end at 8, its data at 12"),
        (entry(4, 8, dtype="Q9"), 8, "b is of type Q9, expected F32"),
    ],
    ids=["the same place", "a gap", "another size", "bytes behind the last", "another type"],
)
def test_tensors_that_do_not_fill_the_file_one_behind_the_other_are_refused(second, room, said):
    with pytest.raises(ValueError, match=said):
        in_order({"a": entry(0, 4), "b": second}, {"F32": 4}, room)
