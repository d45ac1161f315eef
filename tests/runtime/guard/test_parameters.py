"""Parameters of a graph in the weight file, as views of it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from frozen import frozen
from onnx import TensorProto, helper
from txl_runtime.guard.graph_check import Walk
from txl_runtime.guard.protobuf import RefusedError

WEIGHTS = "weights.safetensors"


BUNDLES = [frozen(name) for name in ("int8", "clusters", "half")]
"""Bundles of weights in several types, with tables that are ranges of another."""


def test_every_parameter_is_found_with_the_values_that_onnx_reads():
    seen = 0
    for path in [path for bundle in BUNDLES for path in sorted(bundle.glob("*.onnx"))]:
        whole = np.fromfile(path.parent / WEIGHTS, np.uint8)
        walk = Walk(path.read_bytes(), "step", WEIGHTS, len(whole))
        found = walk.parameters(whole)
        outside = [t for t in onnx.load(path, load_external_data=False).graph.initializer if t.external_data]
        assert set(found) == {tensor.name for tensor in outside}
        for tensor in onnx.load(path).graph.initializer:
            if tensor.name in found:
                expected = onnx.numpy_helper.to_array(tensor)
                assert found[tensor.name].dtype == expected.dtype
                assert np.array_equal(found[tensor.name], expected)
                assert np.shares_memory(found[tensor.name], whole)
                seen += 1
        assert len(walk.parameters(whole[: len(whole) // 2])) < len(found) or not found
    assert seen > 50


WHOLE = np.arange(32, dtype=np.uint8)


def parameters(places: dict[str, str], kind: int = TensorProto.FLOAT, dims: tuple[int, ...] = (2, 3)) -> dict:
    """Return the parameters of a graph with one, in a file of 32 bytes."""
    tensor = TensorProto(name="w", data_type=kind, dims=dims, data_location=1)
    for key, value in ({"location": WEIGHTS, "offset": "8", "length": "24"} | places).items():
        tensor.external_data.add(key=key, value=value)
    graph = helper.make_graph([], "g", [], [], [tensor])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return Walk(model.SerializeToString(), "step", WEIGHTS, len(WHOLE)).parameters(WHOLE)


def test_a_range_that_fits_is_a_view_of_it():
    (tensor,) = parameters({}).values()
    assert tensor.shape == (2, 3)
    assert tensor.tobytes() == WHOLE[8:].tobytes()
    assert parameters({"length": "12"}, TensorProto.BFLOAT16) == {}, "NumPy has no such type"
    with pytest.raises(RefusedError, match="truth values in weights"):
        parameters({"length": "6"}, TensorProto.BOOL)


@pytest.mark.parametrize(
    ("places", "dims"),
    [
        ({}, (2, 4)),
        ({}, (2,)),
        ({}, (-2, -3)),
        ({}, (2**62, 2**62, 0, 3)),
        ({"length": "0"}, (2**63 - 1, 0)),
        ({"length": "0"}, (-1, 0)),
        ({"offset": "9"}, (2, 3)),
        ({"length": "20"}, (2, 3)),
        ({"offset": str(2**70)}, (2, 3)),
    ],
    ids=str,
)
def test_a_range_that_does_not_fit_is_refused(places, dims):
    with pytest.raises(RefusedError):
        parameters(places, dims=dims)
