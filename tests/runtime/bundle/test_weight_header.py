"""Where tensors lie in a safetensors file, and files that are none."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from txl_runtime.bundle.weight_header import StoredTensor, read_header
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
    ],
)
def test_another_file_is_refused(tmp_path, data):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(data)
    with pytest.raises(BundleError, match=r"expected the bundle's weights; export the model again"):
        read_header(path)
