"""What goes in as NaN comes out as NaN, by operators of which ONNX Runtime makes a number; else nothing changes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import small_graphs
from onnx import TensorProto, helper, numpy_helper
from txl_export.graphs.keeping_nan import keep_nan

DRAWS = np.random.default_rng(0)
H = 5


def drawn(*shape: int) -> np.ndarray:
    return DRAWS.normal(size=shape).astype(np.float32)


def results(nodes, given, outputs, constants, guarded=True):
    """What ONNX Runtime makes of the nodes, by the names of the outputs."""
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape) for name, array in given.items()]
    sides = [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()]
    made = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    proto = onnx.shape_inference.infer_shapes(small_graphs.model(nodes, inputs, sides, made), data_prop=True)
    model = ir.from_proto(proto)
    if guarded:
        keep_nan(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return dict(zip(outputs, session.run(list(outputs), given), strict=True))


def node(kind, *inputs, outputs=("y",), **attributes):
    return helper.make_node(kind, inputs, outputs, name=f"{kind}.0", **attributes)


X = np.linspace(-3, 3, 2 * 3 * 4 * 4, dtype=np.float32).reshape(2, 3, 4, 4)
ONE = {
    "ReduceMax": (node("ReduceMax", "x", "axes", keepdims=0), (1, 2)),
    "ReduceMin": (node("ReduceMin", "x", "axes"), (1, 2)),
    "MaxPool": (node("MaxPool", "x", kernel_shape=[2, 2], strides=[2, 2]), (1, 2, 0, 1)),
    "Erf": (node("Erf", "x"), (1, 2, 1, 2)),
    "Shrink": (node("Shrink", "x", lambd=0.5), (1, 2, 1, 2)),
    "TopK": (node("TopK", "x", "two", axis=-1, outputs=("y", "which")), (1, 2, 1)),
}


@pytest.mark.parametrize("name", ONE)
def test_one_nan_is_in_the_results_that_depend_on_it_and_in_no_other(name):
    made, where = ONE[name]
    constants = {"axes": np.array([2, 3]), "two": np.array([2])}
    constants = {key: values for key, values in constants.items() if key in made.input}
    broken = X.copy()
    broken[1, 2, 1, 2] = np.nan
    plain = results([made], {"x": X}, {"y": TensorProto.FLOAT}, constants, guarded=False)["y"]
    assert results([made], {"x": X}, {"y": TensorProto.FLOAT}, constants)["y"].tobytes() == plain.tobytes()
    found = results([made], {"x": broken}, {"y": TensorProto.FLOAT}, constants)["y"]
    expected = np.zeros(plain.shape, np.bool_)
    expected[where] = True
    np.testing.assert_array_equal(np.isnan(found), expected)


def layer(kind, length, direction="forward"):
    """A recurrent layer of two sequences: its node, inputs, weights and outputs."""
    gates, ways = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], 2 if direction == "bidirectional" else 1
    states = ["h", "c"] if kind == "LSTM" else ["h"]
    outputs = ["y", "yh", "yc"][: len(states) + 1]
    made = node(kind, "x", "w", "r", "b", "", *states, outputs=outputs, hidden_size=H, direction=direction)
    given = {"x": drawn(length, 2, 3)} | {name: drawn(ways, 2, H) for name in states}
    constants = {"w": drawn(ways, gates * H, 3), "r": drawn(ways, gates * H, H), "b": drawn(ways, 2 * gates * H)}
    return made, given, dict.fromkeys(outputs, TensorProto.FLOAT), constants


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("length", [1, 4])
def test_a_recurrent_layer_shows_nan_from_its_position_on_and_in_its_sequence_alone(kind, length):
    made, given, outputs, constants = layer(kind, length)
    plain = results([made], given, outputs, constants, guarded=False)
    same = results([made], given, outputs, constants)
    assert all((same[name] == plain[name]).all() for name in outputs)
    at = length // 2
    given["x"][at, 1, 2] = np.nan
    found = results([made], given, outputs, constants)
    expected = np.zeros((length, 1, 2, H), np.bool_)
    expected[at:, :, 1] = True
    np.testing.assert_array_equal(np.isnan(found.pop("y")), expected)
    for values in found.values():
        np.testing.assert_array_equal(np.isnan(values), expected[-1])


@pytest.mark.parametrize(("kind", "state"), [("LSTM", "h"), ("LSTM", "c"), ("GRU", "h"), ("RNN", "h")])
def test_a_recurrent_layer_shows_nan_of_its_state(kind, state):
    made, given, outputs, constants = layer(kind, 4)
    given[state][0, 0, 1] = np.nan
    for values in results([made], given, outputs, constants).values():
        assert np.isnan(values[..., 0, :]).all()
        assert not np.isnan(values[..., 1, :]).any()


def test_a_layer_of_both_directions_shows_nan_everywhere_in_its_sequence():
    made, given, outputs, constants = layer("GRU", 3, "bidirectional")
    given["x"][1, 0, 0] = np.nan
    for values in results([made], given, outputs, constants).values():
        assert np.isnan(values[..., 0, :]).all()
        assert not np.isnan(values[..., 1, :]).any()


@pytest.mark.parametrize(
    "nodes",
    [
        [node("Cast", "x", outputs=["i"], to=TensorProto.INT32), node("ReduceMax", "i", "axes")],
        [node("MaxPool", "x", kernel_shape=[2, 2], dilations=[2, 2])],
        [
            node("Mul", "x", "half", outputs=["scaled"]),
            node("Erf", "scaled", outputs=["e"]),
            node("Mul", "x", "e"),
        ],
    ],
    ids=["whole numbers", "dilated", "GELU"],
)
def test_what_needs_no_guard_or_cannot_have_one_is_left_as_it_is(nodes):
    constants = {"axes": np.array([1]), "half": np.float32(0.5)}
    used = {name for one in nodes for name in one.input}
    made = [numpy_helper.from_array(values, name) for name, values in constants.items() if name in used]
    kind = TensorProto.INT32 if nodes[0].op_type == "Cast" else TensorProto.FLOAT
    graph = small_graphs.model(
        nodes, [small_graphs.value("x", (2, 3, 4, 4))], [helper.make_tensor_value_info("y", kind, None)], made
    )
    model = ir.from_proto(onnx.shape_inference.infer_shapes(graph))
    keep_nan(model)
    assert [one.op_type for one in model.graph] == [one.op_type for one in nodes]
