"""Snapshots that do not fit are refused before anything is changed; files that are none are refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from txl_runtime import StreamState, UsageError, load

B, V = 3, 60


@pytest.fixture(scope="module")
def model(make_bundle):
    return load(make_bundle(batch_size=B, config={}), backend="cpu", threads=1)


def without(state: StreamState, name: str) -> dict[str, Any]:
    return {key: rows for key, rows in state.memory.items() if key != name}


MISFITS: dict[str, Any] = {
    "a surplus tensor": lambda s: replace(s, memory={**s.memory, "layers.99.key": s.memory["layers.00.key"]}),
    "a missing tensor": lambda s: replace(s, memory=without(s, "layers.01.value")),
    "a tensor of another dtype": lambda s: replace(
        s, memory={**s.memory, "layers.00.key": s.memory["layers.00.key"].astype(np.float64)}
    ),
    "a tensor of another shape": lambda s: replace(
        s, memory={**s.memory, "layers.00.key": s.memory["layers.00.key"][:, 1:]}
    ),
    "a tensor that is no array": lambda s: replace(s, memory={**s.memory, "layers.00.key": "rows"}),
    "a fill beyond the memory": lambda s: replace(s, fill=s.fill + 100),
    "a fill of floats": lambda s: replace(s, fill=s.fill.astype(np.float32)),
    "a fill that is no array": lambda s: replace(s, fill=[1, 2, 3]),
    "heads of another number": lambda s: replace(s, head=s.head[:2]),
    "heads of floats": lambda s: replace(s, head=s.head.astype(np.float32)),
    "another model": lambda s: replace(s, model_id="0" * 64),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_refused_and_the_memory_is_what_it_was(model, misfit):
    stream = model.stream()
    stream.feed(np.arange(3 * B).reshape(B, 3))
    state = stream.snapshot()
    stream.feed(np.arange(5 * B).reshape(B, 5) + 1)
    before = stream.snapshot()
    with pytest.raises(UsageError, match=r"expected|restore it in the model it was taken from"):
        stream.restore(MISFITS[misfit](state))
    after = stream.snapshot()
    assert after.fill.tolist() == before.fill.tolist()
    assert after.head.tolist() == before.head.tolist()
    assert all(after.memory[name].tobytes() == rows.tobytes() for name, rows in before.memory.items())


def test_a_surplus_tensor_is_named(model):
    stream = model.stream()
    with pytest.raises(UsageError, match=r"the state's layers\.99\.key is float32 \[.*\], expected no such tensor"):
        stream.restore(MISFITS["a surplus tensor"](stream.snapshot()))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn], ids=["BF16", "F8"])
def test_a_file_with_tensors_that_numpy_has_no_type_for_is_refused(model, tmp_path, dtype):
    import torch
    from safetensors.torch import save_file as save_torch

    kinds = {ml_dtypes.bfloat16: torch.bfloat16, ml_dtypes.float8_e4m3fn: torch.float8_e4m3fn}
    path = tmp_path / "odd.state"
    tensors = {"fill": torch.zeros(B, dtype=torch.int32), "layers.00.key": torch.zeros(2).to(kinds[dtype])}
    save_torch(tensors, path, metadata={"format": "txl-deploy.state/1", "model_id": model.manifest.model_id})
    try:
        state = StreamState.load(path)
    except UsageError as error:
        said = str(error)
    else:
        with pytest.raises(UsageError) as caught:
            model.stream().restore(state)
        said = str(caught.value)
    assert "expected" in said


def test_a_safetensors_file_of_another_kind_is_refused(tmp_path):
    save_file({"fill": np.zeros(2, np.int32)}, tmp_path / "other.safetensors")
    with pytest.raises(UsageError, match="another kind of file, expected a saved state"):
        StreamState.load(tmp_path / "other.safetensors")
