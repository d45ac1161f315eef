"""A graph and its C before they meet: names, constants, memory that temporaries share, numbers."""

from __future__ import annotations

import math
import re

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from txl_engines.shapes import inferred, known_shapes

from txl_deploy.plain_c.generating import _bound, _fold, _in_slots, _multiply_adds, _rename
from txl_deploy.plain_c.rendering import _distinct, _number, identifier, literals

GRAPH = """
<ir_version: 10, opset_import: ["": 18]>
evil (float[2, 3] x, float[2, 4] h) => (float[2, 4] y)
<float[4, 3] w, float[3, 4] v>
{
    turned = Transpose <perm = [1, 0]> (w)
    both = Add (turned, v)
    of_x = MatMul (x, both)
    y = Add (of_x, h)
}
"""


def graph():
    model = onnx.parser.parse_model(GRAPH)
    draws = np.random.default_rng(0)
    model.graph.initializer.extend(
        numpy_helper.from_array(draws.standard_normal(shape).astype(np.float32), name)
        for name, shape in (("w", (4, 3)), ("v", (3, 4)))
    )
    return model


def computed(model, **inputs):
    return ReferenceEvaluator(model).run(None, inputs)[0]


def test_what_depends_on_weights_alone_is_computed_once_and_its_weights_are_gone():
    model, draws = graph(), np.random.default_rng(1)
    given = [draws.standard_normal((2, size)).astype(np.float32) for size in (3, 4)]
    before = computed(model, x=given[0], h=given[1])
    _fold(onnx, model)
    assert [node.op_type for node in model.graph.node] == ["MatMul", "Add"]
    assert [tensor.name for tensor in model.graph.initializer] == ["both"]
    np.testing.assert_array_equal(computed(model, x=given[0], h=given[1]), before)


INDEXED = """
<ir_version: 12, opset_import: ["": 24]>
places (int32[1] i, float[2, 4] data, float[2, 2] part) => (float[1, 4] a, float[1, 4] b, float[2, 4] c, float[2, 4] d)
{
    a = Gather (data, i)
    wide = Cast <to = 7> (i)
    deep = Unsqueeze (wide, zero)
    b = GatherND (data, deep)
    c = ScatterND (data, deep, b)
    both = Expand (wide, two)
    d = TensorScatter <axis = 1> (data, part, both)
}
"""


@pytest.mark.parametrize(
    ("index", "row", "column"), [(-3, 0, 0), (-2, 0, 0), (0, 0, 0), (1, 1, 1), (2, 1, 2), (9, 1, 2)]
)
def test_an_index_out_of_range_is_taken_for_the_nearest_one(index, row, column):
    """ONNX Runtime refuses such a step; C would read and write what lies beside an array."""
    model = onnx.parser.parse_model(INDEXED)
    model.graph.initializer.extend(
        numpy_helper.from_array(np.array([value], np.int64), name) for name, value in (("zero", 0), ("two", 2))
    )
    model = inferred(model)
    _bound(onnx, model)
    data, part = np.arange(8, dtype=np.float32).reshape(2, 4), np.full((2, 2), 9, np.float32)
    a, b, c, d = ReferenceEvaluator(model).run(None, {"i": np.array([index], np.int32), "data": data, "part": part})
    np.testing.assert_array_equal(a[0], data[row])
    np.testing.assert_array_equal(b[0], data[row])
    np.testing.assert_array_equal(c, data)
    assert np.flatnonzero(d[0] == 9).tolist() == [column, column + 1]


def test_no_name_of_a_stranger_reaches_the_text():
    model = graph()
    model.graph.node[0].name = "*/ int main(void) { /*"
    model.graph.doc_string = model.producer_name = "*/ #include </etc/passwd> /*"
    helper.set_model_props(model, {"*/": "*/"})
    _rename(model)
    assert b"*/" not in model.SerializeToString()
    assert b"evil" not in model.SerializeToString()
    onnx.checker.check_model(model, full_check=True)


def test_shapes_behind_a_product_with_a_quantised_matrix_are_known():
    node = helper.make_node(
        "MatMulNBits", ["x", "q", "s"], ["p"], domain="com.microsoft", K=32, N=7, bits=4, block_size=32
    )
    sides = [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, 5, 32))]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, (7, 5, 2))
    turn = helper.make_node("Transpose", ["p"], ["y"])
    weights = [
        numpy_helper.from_array(np.zeros((7, 1, 16), np.uint8), "q"),
        numpy_helper.from_array(np.ones(7, np.float32), "s"),
    ]
    body = helper.make_graph([node, turn], "quantised", sides, [result], weights)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(body, opset_imports=imports, ir_version=10)
    assert known_shapes(inferred(model).graph)["p"] == (2, 5, 7)
    assert _multiply_adds(inferred(model)) == 2 * 5 * 7 * 32


def test_temporaries_share_memory_only_while_nothing_reads_them_any_more():
    body = """const float x[4], float y[4]) {
    float tmp0_a[4];
    float tmp1_b[8];
    float tmp2_c[4];
    bool tmp3_d[8];
    float tmp4_e[2];
    f(x, tmp0_a);
    f(tmp0_a, tmp1_b);
    f(tmp1_b, tmp2_c);
    g(tmp2_c, tmp3_d);
    f(tmp3_d, tmp4_e);
    f(tmp4_e, y);
}
"""
    text = _in_slots(body)
    unions = [re.findall(r"tmp\w+", union) for union in re.findall(r"union {(.*?)}", text, re.DOTALL)]
    assert unions == [["tmp1_b", "tmp4_e"], ["tmp3_d"], ["tmp0_a", "tmp2_c"]]
    calls = re.findall(r"^    [fg]\((.*)\);", text, re.MULTILINE)
    assert calls[1] == "slot2.tmp0_a, slot0.tmp1_b"
    assert calls[3] == "slot2.tmp2_c, slot1.tmp3_d"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("policy", "policy"),
        ("gru-1x256.b1", "gru_1x256_b1"),
        ("1x", "m_1x"),
        ("new", "new_"),
        ("é", "m__"),
        ("_a", "m__a"),
    ],
)
def test_names_are_such_that_c_and_cpp_take_them(name, found):
    assert identifier(name) == found


def test_names_of_a_bundle_are_apart_in_capitals_too_and_hide_nothing_of_the_package():
    """Macros are in capitals; a parameter would hide a weight, a copy of another input, the program or a type."""
    given = ["x", "X", "x.", "weight_0", "read_x", "m_program", "int32_t", "i", "obs_t"]
    assert list(_distinct(given, "m").values()) == [
        *("x", "X_", "x__", "m_weight_0", "m_read_x", "m_m_program", "m_int32_t", "i_", "obs_t")
    ]


def test_numbers_are_written_so_that_the_same_ones_are_read():
    values = np.array([0.1, -0.0, 1e-45, 3.4028235e38, np.inf, -np.inf, np.nan, 1 / 3], np.float32)
    written = literals(values).replace("\n", "").split(", ")
    read = [{"INFINITY": math.inf, "-INFINITY": -math.inf, "NAN": math.nan}.get(each) for each in written]
    read = [float(each[:-1]) if value is None else value for value, each in zip(read, written, strict=True)]
    np.testing.assert_array_equal(np.array(read, np.float32), values)
    assert literals(np.array([-(2**31), 7], np.int32)) == "-2147483648, 7"


def test_a_rate_that_is_no_number_of_c_is_left_out():
    values = [10**400, -(10**400), math.inf, math.nan, True, "50", None, 50]
    assert [_number(value) for value in values] == [None] * 7 + [50.0]
