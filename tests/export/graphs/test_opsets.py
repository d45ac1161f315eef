"""Newer opsets than a bundle's, written as older ones."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from small_graphs import model, value
from txl_export.graphs.opsets import as_standard, lower


@pytest.mark.parametrize(
    ("node", "opset", "wanted"),
    [
        (helper.make_node("Reshape", ["x", "sizes"], ["y"]), 27, 18),
        (helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT), 25, 18),
        (helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT, saturate=1), 25, 24),
        (helper.make_node("Swish", ["x"], ["y"]), 26, 24),
        (helper.make_node("Abs", ["x"], ["y"]), 20, 20),
    ],
)
def test_a_graph_gets_the_oldest_opset_under_which_it_is_the_same(node, opset, wanted):
    given = ir.from_proto(model([node], [value("x", [1])], [value("y", [1])], opset=opset))
    lower(given.graph)
    assert given.graph.opset_imports[""] == wanted


@pytest.mark.parametrize(("said", "domain"), [({}, ""), ({"channels_last": 1}, "com.microsoft")])
def test_onnx_runtime_s_own_operator_is_the_standard_s_unless_more_is_said(said, domain):
    node = helper.make_node("CausalConvWithState", ["x", "w"], ["y", "s"], "node", domain="com.microsoft", **said)
    given = ir.from_proto(model([node], [value("x", [1, 2, 3])], [value("y", [1, 2, 3])], opset=20))
    as_standard(given.graph)
    assert given.graph[0].domain == domain
    assert given.graph.opset_imports[""] == (20 if domain else 27)
