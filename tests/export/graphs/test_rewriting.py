"""Operators that a bundle's graphs lack, written with those that they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from small_graphs import model, value
from txl_export.graphs.settling import settle
from txl_export.graphs.unsettled import UnsettledError
from txl_runtime.bundle.tables import TensorSpec

X = np.random.default_rng(0).normal(size=(5, 2, 3)).astype(np.float32)


def settled(made: onnx.ModelProto) -> onnx.ModelProto:
    """A graph of one input and one output, made a program's."""
    (given,), (result,) = made.graph.input, made.graph.output

    def spec(port: onnx.ValueInfoProto) -> TensorSpec:
        dims = port.type.tensor_type.shape.dim
        return TensorSpec(name=port.name, dtype="float32", shape=tuple(dim.dim_value for dim in dims))

    taken = ir.from_proto(made)
    settle(taken, "step", [spec(given)], [spec(result)], [made.opset_import[0].version])
    return ir.to_proto(taken)


def run(made: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(made.SerializeToString())
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def graph(
    nodes: Sequence[onnx.NodeProto], result: Sequence[int], constants: Mapping[str, np.ndarray], opset: int = 18
) -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    return model(nodes, [value("x", X.shape)], [value("y", result)], tensors, opset)


def test_dropout_that_is_off_passes_on_what_it_is_given():
    off = helper.make_node("Dropout", ["x", "ratio", "training"], ["y"])
    constants = {"ratio": np.float32(0.5), "training": np.array(False)}
    made = settled(graph([off], X.shape, constants))
    assert [node.op_type for node in made.graph.node] == ["Identity"]
    np.testing.assert_array_equal(run(made, X), X)
    with pytest.raises(UnsettledError, match="it draws random numbers"):
        settled(graph([off], X.shape, {**constants, "training": np.array(True)}))


def test_a_recurrence_s_usual_activations_need_not_be_said():
    rng = np.random.default_rng(1)
    weights = {"w": rng.normal(size=(1, 12, 3)), "r": rng.normal(size=(1, 12, 4))}
    constants = {name: array.astype(np.float32) for name, array in weights.items()}
    said = {"hidden_size": 4, "linear_before_reset": 1}
    usual = helper.make_node("GRU", ["x", "w", "r"], ["y"], activations=["Sigmoid", "Tanh"], layout=0, **said)
    file = graph([usual], (5, 1, 2, 4), constants)
    made = settled(file)
    assert {attribute.name for attribute in made.graph.node[0].attribute} == {"hidden_size", "linear_before_reset"}
    np.testing.assert_array_equal(run(made, X), run(file, X))
    with pytest.raises(UnsettledError, match="activations"):
        settled(
            graph(
                [helper.make_node("GRU", ["x", "w", "r"], ["y"], activations=["Relu", "Tanh"], **said)],
                (5, 1, 2, 4),
                constants,
            )
        )


def test_an_operator_of_somebody_else_is_not_the_standard_s_of_that_name():
    nodes = [helper.make_node("Mul", ["bias", "bias"], ["made"])]
    nodes += [helper.make_node("Conv", ["x", "weight", "made"], ["y"], domain="elsewhere")]
    file = graph(nodes, (5, 2, 2), {"weight": np.ones((2, 2, 2), np.float32), "bias": np.ones(2, np.float32)})
    file.opset_import.append(helper.make_opsetid("elsewhere", 1))
    with pytest.raises(UnsettledError, match="the operator elsewhere::Conv, which ONNX's standard lacks"):
        settled(file)


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("computed", ["weight", "bias"])
def test_a_computed_bias_is_added_behind_a_convolution(op, computed):
    """Readers take a bias in a convolution only where its size and the weights' are known."""
    rng = np.random.default_rng(2)
    constants = {"weight": rng.normal(size=(2, 2, 2)), "bias": rng.normal(size=2), "two": np.array(2.0)}
    constants = {name: array.astype(np.float32) for name, array in constants.items()}
    nodes = [helper.make_node("Mul", [computed, "two"], ["made"])]
    names = ["x", *("made" if name == computed else name for name in ("weight", "bias"))]
    nodes += [helper.make_node(op, names, ["y"], strides=[1])]
    file = graph(nodes, (5, 2, 2 if op == "Conv" else 4), constants)
    made = settled(file)
    assert [len(node.input) for node in made.graph.node if node.op_type == op] == [2]
    np.testing.assert_allclose(run(made, X), run(file, X), rtol=0, atol=1e-6)
