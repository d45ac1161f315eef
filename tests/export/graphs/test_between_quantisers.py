"""Operators on quantised numbers, beside what ONNX Runtime makes of them: a step of the result apart at most."""

from __future__ import annotations

from collections.abc import Mapping

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
from txl_runtime.guard.forms import MICROSOFT

DRAWS = np.random.default_rng(0)
X = DRAWS.normal(size=(1, 4, 9)).astype(np.float32)
CONSTANTS: Mapping[str, np.ndarray] = {
    "xs": np.float32(0.02),
    "xz": np.uint8(120),
    "ys": np.float32(0.05),
    "yz": np.uint8(130),
    "ws": np.float32(0.01),
    "wz": np.int8(0),
    "channels": DRAWS.random(6, np.float32) / 50,
    "zeros": np.zeros(6, np.int8),
    "conv": DRAWS.integers(-128, 128, (6, 4, 3), np.int8),
    "matrix": DRAWS.integers(-128, 128, (9, 6), np.int8),
    "bias": DRAWS.integers(-999, 999, 6, np.int32),
}
CASES = {
    "QLinearAdd": ("xq xs xz xq xs xz ys yz", {}, (1, 4, 9)),
    "QLinearMul": ("xq xs xz xq xs xz ys yz", {}, (1, 4, 9)),
    "QLinearSigmoid": ("xq xs xz ys yz", {}, (1, 4, 9)),
    "QLinearLeakyRelu": ("xq xs xz ys yz", {"alpha": 0.3}, (1, 4, 9)),
    "QLinearSoftmax": ("xq xs xz ys yz", {"axis": 1, "opset": 18}, (1, 4, 9)),
    "QLinearConcat": ("ys yz xq xs xz xq xs xz", {"axis": 2}, (1, 4, 18)),
    "QLinearConv": ("xq xs xz conv channels zeros ys yz bias", {}, (1, 6, 7)),
    "QLinearConv of one scale": ("xq xs xz conv ws wz ys yz", {"pads": [1, 1]}, (1, 6, 9)),
    "QLinearMatMul": ("xq xs xz matrix channels zeros ys yz", {}, (1, 4, 6)),
    "QGemm": ("flat xs xz matrix channels zeros bias ys yz", {}, (4, 6)),
    "QGemm of a factor": ("flat xs xz matrix channels zeros bias ys yz", {"alpha": 0.5}, (4, 6)),
}


def around(name: str, inputs: str, said: Mapping[str, object], result: tuple[int, ...]) -> onnx.ModelProto:
    """x quantised, the operator, and its result as real numbers."""
    domain = "" if name in ("QLinearConv", "QLinearMatMul") else MICROSOFT
    nodes = [helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["xq"])]
    nodes += [helper.make_node("Reshape", ["xq", "rows"], ["flat"])] * ("flat" in inputs)
    nodes += [helper.make_node(name, inputs.split(), ["code"], name="one", domain=domain, **said)]
    nodes += [helper.make_node("DequantizeLinear", ["code", "ys", "yz"], ["y"])]
    constants = {"rows": np.int64([4, 9]), **CONSTANTS}
    tensors = [numpy_helper.from_array(np.asarray(array), key) for key, array in constants.items()]
    made = model(nodes, [value("x", X.shape)], [value("y", result)], tensors)
    made.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    return made


def settled(made: onnx.ModelProto, result: tuple[int, ...]) -> onnx.ModelProto:
    taken = ir.from_proto(made)
    settle(
        taken,
        "step",
        [TensorSpec(name="x", dtype="float32", shape=X.shape)],
        [TensorSpec(name="y", dtype="float32", shape=result)],
    )
    return ir.to_proto(taken)


def run(made: onnx.ModelProto, level: int) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel(level)
    return onnxruntime.InferenceSession(made.SerializeToString(), options).run(None, {"x": X})[0]


@pytest.mark.parametrize("case", CASES)
def test_an_operator_between_quantisers_computes_what_it_computed(case):
    inputs, said, result = CASES[case]
    file = around(case.split()[0], inputs, said, result)
    made = settled(file, result)
    assert not any(node.op_type.startswith(("QLinear", "QGemm")) for node in made.graph.node)
    assert [entry.domain for entry in made.opset_import] == [""]
    expected, found = run(file, 99), run(made, 99)
    assert len(np.unique(expected)) > 5
    apart = np.abs(found - expected) / CONSTANTS["ys"]
    assert apart.max() < 1.01  # a number between two steps goes to either where sums are of other precision
    assert (apart > 0.5).mean() <= 0.02
    assert np.abs(run(made, 0) - expected).max() < 1.01 * CONSTANTS["ys"]  # by an engine that joins nothing


def test_a_softmax_of_the_axes_from_one_on_stays_and_is_refused():
    file = around("QLinearSoftmax", "xq xs xz ys yz", {"axis": 1, "opset": 11}, X.shape)
    with pytest.raises(UnsettledError, match="the operator QLinearSoftmax, which no graph of a bundle may have"):
        settled(file, X.shape)
