"""Passes on graphs that they cannot expect: the same numbers, and no value of another's name."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray
from txl_export.graphs.passes.improving import improve
from txl_export.graphs.passes.views import is_constant
from txl_export.graphs.quantised_matmul import initializer
from txl_export.graphs.settling import infer_shapes

HEAD = '<ir_version: 10, opset_import: ["" : 18]>'


def parsed(text: str, **weights: NDArray[np.generic]) -> ir.Model:
    """A graph, with constants of these values."""
    proto = onnx.parser.parse_model(f"{HEAD} {text}")
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    model = ir.from_proto(proto)
    infer_shapes(model)
    return model


def run(model: ir.Model, x: NDArray[np.float32]) -> list[NDArray[np.generic]]:
    content = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    found: list[NDArray[np.generic]] = session.run(None, {"x": x})
    return found


def drawn(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def both(model: ir.Model, x: NDArray[np.float32]) -> set[str]:
    """Compare a graph's numbers before and after all passes; the operators that it has then."""
    expected = run(model, x)
    improve(model)
    for one, other in zip(run(model, x), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    return {node.op_type for node in model.graph}


def test_two_parts_of_one_split_are_products_of_their_own():
    text = """step (float[2, 64] x) => (float[2, 64] y, float[2, 64] z) {
        both = MatMul(x, weight)
        a, b, c, d = Split<axis = 1, num_outputs = 4>(both)
        y = Tanh(a)
        z = Sigmoid(c)
    }"""
    assert "Split" not in both(parsed(text, weight=drawn(64, 256)), drawn(2, 64))


@pytest.mark.parametrize("equation", ["bid,bjd->bij", "bid,bjd->bji"])
def test_a_sum_over_an_axis_that_one_operand_has_once_stays(equation: str):
    text = f"""step (float[2, 5, 4] x) => (float[2, 5, 5] y) {{
        one = MatMul(x, weight)
        y = Einsum<equation = "{equation}">(one, x)
    }}"""
    assert "Einsum" in both(parsed(text, weight=drawn(4, 1)), drawn(2, 5, 4))


@pytest.mark.parametrize(("rows", "width", "stays"), [(6, 8, True), (24, 32, False)])
def test_attention_over_few_small_rows_stays(rows: int, width: int, stays: bool):
    text = f"""step (float[1, {rows}, {width}] x) => (float[1, 1, {rows}] y) {{
        query = ReduceMax(x, axis)
        keys = MatMul(x, weight)
        turned = Transpose<perm = [0, 2, 1]>(keys)
        y = MatMul(query, turned)
    }}"""
    model = parsed(text, weight=drawn(width, width) / width, axis=np.array([1]))
    both(model, drawn(1, rows, width))
    assert ("keys" in {node.outputs[0].name for node in model.graph}) is stays


@pytest.mark.parametrize(("width", "stays"), [(8, True), (64, False)])
def test_a_small_product_of_which_half_is_read_stays(width: int, stays: bool):
    text = f"""step (float[2, {width}] x) => (float[2, {width}] y) {{
        all = MatMul(x, weight)
        part = Slice(all, zero, half, axis)
        y = Tanh(part)
    }}"""
    bounds = {"zero": np.array([0]), "half": np.array([width]), "axis": np.array([1])}
    model = parsed(text, weight=drawn(width, 2 * width), **bounds)
    both(model, drawn(2, width))
    assert ("all" in {node.outputs[0].name for node in model.graph}) is stays


def test_constants_of_passes_are_no_weights_of_the_same_name():
    text = """step (float[2, 8] x) => (float[2, 4] y) {
        joined = Concat<axis = 1>(x, x)
        part = Slice(joined, first, end, axis)
        product = MatMul(part, whole)
        y = Add(product, added)
    }"""
    made = parsed(text, first=np.array([10]), end=np.array([14]), axis=np.array([1]), whole=drawn(4, 4), added=drawn(4))
    made.graph.initializers["whole"].name = "bound.2"
    made.graph.initializers["added"].name = "bound.1"
    both(made, drawn(2, 8))


def test_a_name_of_another_value_is_made_longer():
    graph = ir.Graph([], [], nodes=[], name="step")
    one, other = initializer(graph, "bound.1", np.array([1])), initializer(graph, "bound.1", np.array(1))
    assert initializer(graph, "bound.1", np.array([1])) is one
    assert initializer(graph, "bound.1", np.array(1)) is other is not one


def test_a_graph_may_be_deeper_than_functions_can_call_themselves():
    value = ir.Value(name="x")
    graph = ir.Graph([value], [], nodes=[], name="step")
    for _ in range(3000):
        node = ir.node("Add", [value, value])
        graph.append(node)
        value = node.outputs[0]
    assert not is_constant(value)


@pytest.mark.parametrize("quantised", [False, True])
def test_a_graph_with_quantisers_keeps_its_operators(quantised: bool):
    """A pass that rounds differently by 1e-7 would change a step of the quantiser behind it."""
    behind = "b, s, z = DynamicQuantizeLinear(h) y = DequantizeLinear(b, s, z)" if quantised else "y = Neg(h)"
    text = f"""step (float[1, 1, 4] x) => (float[1, 1, 3] y) {{
        a, h = GRU<hidden_size = 3>(x, w, r, , , first)
        {behind}
    }}"""
    model = parsed(text, w=drawn(1, 9, 4), r=drawn(1, 9, 3), first=drawn(1, 1, 3))
    improve(model)
    assert ("GRU" in {node.op_type for node in model.graph}) is quantised
