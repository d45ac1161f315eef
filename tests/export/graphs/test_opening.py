"""A graph of any number of sequences, made of two of fixed numbers: what follows from B, in which forms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_ir.passes.common import ShapeInferencePass
from txl_export.graphs.opening import FixedBatchError, open_batch
from txl_runtime.bundle.open_batch import BATCH

B, WIDTH = 3, 6
Nodes = list[tuple[str, list[str], dict[str, object]]]
Constants = dict[str, object]


def graph(make: Callable[[int], tuple[Nodes, Constants]], size: int) -> ir.Model:
    """From x [size, 6] and before [2, size, 6], through nodes each of which reads the last one's result as "_"."""
    nodes, constants = make(size)
    made, last = [], "x"
    for number, (operator, inputs, attributes) in enumerate(nodes):
        names = [last if name == "_" else name for name in inputs]
        last = "y" if number == len(nodes) - 1 else f"value.{number}"
        made.append(helper.make_node(operator, names, [last], name=f"{operator}.{number}", **attributes))
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, (size, WIDTH)),
        helper.make_tensor_value_info("before", TensorProto.FLOAT, (2, size, WIDTH)),
    ]
    stored = [numpy_helper.from_array(np.asarray(values), name) for name, values in constants.items()]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    model = helper.make_model(
        helper.make_graph(made, "g", inputs, outputs, stored),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=10,
    )
    found = ir.from_proto(onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True))
    ShapeInferencePass()(found)
    return found


def run(model: ir.Model, size: int) -> np.ndarray:
    draws = np.random.default_rng(0)
    x = draws.normal(size=(B + 1, WIDTH)).astype(np.float32)[:size]
    before = draws.normal(size=(2, B + 1, WIDTH)).astype(np.float32)[:, :size]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    return session.run(None, {"x": x, "before": before})[0]


def whole(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


FORMS: dict[str, tuple[Callable[[int], tuple[Nodes, Constants]], set[str]]] = {
    "a size that is kept": (lambda b: ([("Reshape", ["_", "s"], {})], {"s": whole(b, 2, 3)}), {"Reshape"}),
    "a size that is kept, where 0 means none": (
        lambda b: ([("Reshape", ["_", "s"], {"allowzero": 1})], {"s": whole(b, 2, -1)}),
        {"Reshape"},
    ),
    "a size that is left": (lambda b: ([("Reshape", ["_", "s"], {})], {"s": whole(2 * b, 3)}), {"Reshape"}),
    "a size that is left behind others": (
        lambda b: ([("Reshape", ["before", "s"], {})], {"s": whole(2, 6, b)}),
        {"Reshape"},
    ),
    "sizes that are computed": (
        lambda b: ([("Reshape", ["before", "s"], {"allowzero": 1})], {"s": whole(-1, 2 * b)}),
        {"Reshape", "Shape", "Mul", "Concat", "Cast"},
    ),
    "an expansion along an axis that is there": (
        lambda b: (
            [("Unsqueeze", ["_", "one"], {}), ("Expand", ["_", "s"], {})],
            {"one": whole(1), "s": whole(b, 4, WIDTH)},
        ),
        {"Unsqueeze", "Expand"},
    ),
    "an expansion to sequences": (
        lambda b: (
            [("Expand", ["v", "s"], {}), ("Add", ["_", "x"], {})],
            {"v": np.ones(1, np.float32), "s": whole(b, 1)},
        ),
        {"Expand", "Add", "Shape", "Concat", "Cast"},
    ),
    "a table": (
        lambda b: ([("Add", ["_", "t"], {})], {"t": np.arange(b * WIDTH, dtype=np.float32).reshape(b, WIDTH)}),
        {"Add", "Shape", "Slice"},
    ),
    "a table along another axis, of several entries for each": (
        lambda b: (
            [("Transpose", ["before"], {"perm": [2, 0, 1]}), ("Reshape", ["_", "s"], {}), ("Mul", ["_", "t"], {})],
            {"s": whole(WIDTH, 2 * b), "t": np.arange(2.0 * b, dtype=np.float32)[None]},
        ),
        {"Transpose", "Reshape", "Mul", "Shape", "Slice"},
    ),
    "numbers of 32 bits, and a single one": (
        lambda b: (
            [
                ("Range", ["zero", "n", "one"], {}),
                ("Gather", ["x", "_"], {"axis": 0}),
                ("Gather", ["_", "places"], {"axis": 1}),
            ],
            {"zero": np.int32(0), "n": np.int32(b), "one": np.int32(1), "places": np.array([5, 0], np.int32)},
        ),
        {"Range", "Gather", "Shape", "Squeeze", "Cast"},
    ),
    "axes of one entry that are dropped": (
        lambda b: ([("Unsqueeze", ["_", "one"], {}), ("Squeeze", ["_"], {})], {"one": whole(1)}),
        {"Unsqueeze", "Squeeze"},
    ),
    "repetitions": (
        lambda b: (
            [("Tile", ["v", "n"], {}), ("Add", ["_", "x"], {})],
            {"v": np.ones((1, WIDTH), np.float32), "n": whole(b, 1)},
        ),
        {"Tile", "Add", "Shape", "Concat", "Cast"},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_opened_graph_is_each_graph_of_a_fixed_number(form):
    make, operators = FORMS[form]
    model, expected = graph(make, B), {size: run(graph(make, size), size) for size in range(1, B + 2)}
    open_batch(model, graph(make, B + 1), B)
    assert {node.op_type for node in model.graph} == operators
    assert [list(value.shape or ()) for value in model.graph.inputs] == [[BATCH, WIDTH], [2, BATCH, WIDTH]]
    for size in range(1, B + ("table" not in form) + 1):
        assert run(model, size).tobytes() == expected[size].tobytes(), size


def test_sizes_are_those_that_both_have_and_the_number_of_sequences():
    make, _ = FORMS["a size that is left"]
    model = graph(make, B)
    open_batch(model, graph(make, B + 1), B)
    (node,) = model.graph
    assert list(node.outputs[0].shape or ()) == [None, 3], "twice as many are not those of an input"


def test_a_constant_that_is_read_in_several_ways_stands_where_it_stood_once_for_each():
    def make(b: int) -> tuple[Nodes, Constants]:
        nodes: Nodes = [
            ("Reshape", ["_", "s"], {}),
            ("Transpose", ["_"], {"perm": [1, 0, 2]}),
            ("Reshape", ["_", "t"], {}),
            ("Expand", ["_", "s"], {}),
        ]
        return nodes, {"s": whole(b, 2, 3), "t": whole(-1, 2, 3), "unread": whole(b)}

    model = graph(make, B)
    open_batch(model, graph(make, B + 1), B)
    names = [name for name in model.graph.initializers if not name.startswith(BATCH)]
    assert names == ["s[batch]", "s[batch]2", "t"]
    assert run(model, 2).shape == (2, 2, 3)


REFUSED: dict[str, tuple[Callable[[int], tuple[Nodes, Constants]], str]] = {
    "an operator for each sequence": (
        lambda b: ([("Neg", ["_"], {})] * b, {}),
        "the graph of 4 sequences has more operators or fewer",
    ),
    "another operator": (lambda b: ([("Neg" if b == B else "Abs", ["_"], {})], {}), "Neg is another operator"),
    "another attribute": (lambda b: ([("Softmax", ["_"], {"axis": b % 2})], {}), "Softmax has another axis"),
    "another value": (
        lambda b: ([("Neg", ["x"], {}), ("Add", ["_", "x" if b == B else "_"], {})], {}),
        "Add reads something else",
    ),
    "a share": (
        lambda b: ([("Div", ["_", "n"], {})], {"n": np.float32(b)}),
        "Div computes with a number that changes with B",
    ),
    "a bound that few values reach": (
        lambda b: (
            [
                ("Cast", ["_"], {"to": TensorProto.INT64}),
                ("Min", ["_", "n"], {}),
                ("Cast", ["_"], {"to": TensorProto.FLOAT}),
            ],
            {"n": whole(1000 * b)},
        ),
        "Min computes with a number that changes with B",
    ),
    "one less": (
        lambda b: ([("Slice", ["_", "zero", "n"], {})], {"zero": whole(0), "n": whole(b - 1)}),
        "Slice computes with a number that changes with B",
    ),
    "a table of another order": (
        lambda b: ([("Add", ["_", "t"], {})], {"t": np.arange(b, dtype=np.float32)[::-1, None].copy()}),
        "Add reads a constant that changes with B in another way",
    ),
    "a table along two axes": (
        lambda b: ([("MatMul", ["t", "_"], {})], {"t": np.eye(b, dtype=np.float32)}),
        "MatMul reads a constant that changes with B in another way",
    ),
}


@pytest.mark.parametrize("form", REFUSED)
def test_what_follows_from_b_in_another_way_is_named(form):
    make, said = REFUSED[form]
    with pytest.raises(FixedBatchError, match=said):
        open_batch(graph(make, B), graph(make, B + 1), B)
