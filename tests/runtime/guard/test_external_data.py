"""Parameters of a graph in the weight file, found without a package for graphs."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from frozen import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from txl_runtime.guard.external_data import external_tensors

WEIGHTS = "weights.safetensors"


BUNDLES = [frozen(name) for name in ("int8", "clusters", "half")]
"""Of weights in several types, with tables that are ranges of another."""


def content(bundle):
    return np.fromfile(bundle / WEIGHTS, np.uint8)


def test_every_parameter_is_found_with_the_values_that_onnx_reads():
    seen = 0
    for path in [path for bundle in BUNDLES for path in sorted(bundle.glob("*.onnx"))]:
        whole = content(path.parent)
        found = external_tensors(path.read_bytes(), WEIGHTS, whole)
        outside = [t for t in onnx.load(path, load_external_data=False).graph.initializer if t.external_data]
        assert set(found) == {tensor.name for tensor in outside}
        for tensor in onnx.load(path).graph.initializer:
            if tensor.name in found:
                expected = onnx.numpy_helper.to_array(tensor)
                assert found[tensor.name].dtype == expected.dtype
                assert np.array_equal(found[tensor.name], expected)
                assert np.shares_memory(found[tensor.name], whole)
                seen += 1
    assert seen > 50


def test_another_file_and_ranges_outside_of_this_one_are_left_out():
    graph, whole = (BUNDLES[0] / "hidden-ring.onnx").read_bytes(), content(BUNDLES[0])
    assert external_tensors(graph, "other.bin", whole) == {}
    shorter = external_tensors(graph, WEIGHTS, whole[: len(whole) // 2])
    assert len(shorter) < len(external_tensors(graph, WEIGHTS, whole))


def _tensor(**changes):
    tensor = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[2, 3], data_location=1)
    values = {"location": WEIGHTS, "offset": "8", "length": "24"} | changes.pop("places", {})
    for key, value in values.items():
        tensor.external_data.add(key=key, value=value)
    for key, value in changes.items():
        if key == "dims":
            tensor.dims[:] = value
        else:
            setattr(tensor, key, value)
    graph = onnx.GraphProto(name="g")
    graph.initializer.append(tensor)
    return onnx.ModelProto(ir_version=10, graph=graph).SerializeToString()


WHOLE = np.arange(32, dtype=np.uint8)


def test_a_range_that_fits_is_a_view_of_it():
    (tensor,) = external_tensors(_tensor(), WEIGHTS, WHOLE).values()
    assert tensor.shape == (2, 3)
    assert tensor.tobytes() == WHOLE[8:].tobytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"dims": [2, 4]},
        {"dims": [2]},
        {"dims": [-2, -3]},
        {"dims": [2**62, 2**62, 0, 3]},
        {"dims": [2**63 - 1, 0], "places": {"length": "0"}},
        {"dims": [-1, 0], "places": {"length": "0"}},
        {"data_type": onnx.TensorProto.DOUBLE},
        {"data_type": onnx.TensorProto.BFLOAT16},
        {"data_type": 999},
        {"places": {"offset": "9"}},
        {"places": {"offset": "-30"}},
        {"places": {"offset": "x"}},
        {"places": {"length": "-1"}},
        {"places": {"length": "20"}},
        {"places": {"offset": str(2**70)}},
    ],
    ids=str,
)
def test_a_range_that_does_not_fit_is_left_out(changes):
    assert external_tensors(_tensor(**changes), WEIGHTS, WHOLE) == {}


def test_a_number_that_never_ends_is_not_read():
    assert external_tensors(b"\x3a" + b"\xff" * 1_000_000, WEIGHTS, WHOLE) == {}


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=8), st.integers(0, 200))
def test_whatever_a_graph_says_nothing_outside_of_the_file_is_returned(edits, cut):
    graph = bytearray(_tensor())
    for place, value in edits:
        graph[place % len(graph)] = value
    for tensor in external_tensors(bytes(graph[: len(graph) - cut % 20]), WEIGHTS, WHOLE).values():
        assert tensor.nbytes == 0 or np.shares_memory(tensor, WHOLE)
