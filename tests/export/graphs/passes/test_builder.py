"""Nodes that a pass makes: constants that are shared, names of their own, and results of a graph that stay results."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx import helper
from passed_graphs import run, small
from txl_export.graphs.passes.builder import Builder


def _graph() -> ir.Model:
    return small([helper.make_node("Relu", ["x"], ["y"], name="relu")], {"x": (2, 3)}, {})


def test_equal_constants_are_one_and_those_of_another_type_or_shape_are_not() -> None:
    build = Builder(_graph().graph, "test")
    long = np.arange(20)
    assert build.numbers(1, 2) is build.numbers(1, 2)
    assert build.constant(long) is build.constant(long.copy())
    others = [np.array(1), np.array([1]), np.array([[1]]), np.array(1, np.int32), np.array([1], np.float32), long[::-1]]
    assert len({build.constant(one) for one in (*others, long)}) == len(others) + 1


def test_what_is_made_in_front_of_a_node_has_names_of_its_own_and_the_shapes_that_it_will_have() -> None:
    model = _graph()
    build = Builder(model.graph, "test").at(model.graph[0])
    x = model.graph.inputs[0]
    parts = build.split(x, [1, 2], 1)
    row, column = build.gather(x, 1, 0), build.gather(x, [2, 0], 1)
    made = [*parts, row, column, build.slice(x, 1, 1, 3), build.transpose(x, [1, 0]), build.concat([x, x], 1)]
    assert [tuple(one.shape or ()) for one in made] == [(2, 1), (2, 2), (3,), (2, 2), (2, 2), (3, 2), (2, 6)]
    assert {one.dtype for one in made} == {ir.DataType.FLOAT}
    assert len({one.name for one in made}) == len(made)
    assert model.graph[-1].name == "relu"


def test_many_equal_parts_need_no_list_that_would_lie_outside_of_the_graph() -> None:
    model = small([helper.make_node("Relu", ["x"], ["y"], name="relu")], {"x": (200, 3)}, {})
    parts = Builder(model.graph, "test").at(model.graph[0]).split(model.graph.inputs[0], [1] * 200, 0)
    assert {tuple(part.shape or ()) for part in parts} == {(1, 3)}
    assert not model.graph.initializers
    x = np.arange(600, dtype=np.float32).reshape(200, 3)
    model.graph.outputs[:] = [parts[150]]
    assert np.array_equal(run(model, {"x": x})[0], x[150:151])


def test_a_result_that_an_input_replaces_keeps_its_name_and_the_input_its_own() -> None:
    model = _graph()
    build = Builder(model.graph, "test").at(model.graph[0])
    build.replace(model.graph.outputs[0], model.graph.inputs[0])
    assert [value.name for value in (*model.graph.inputs, *model.graph.outputs)] == ["x", "y"]
    x = np.array([[-1, 2, -3], [4, -5, 6]], np.float32)
    assert np.array_equal(run(model, {"x": x})[0], x)
