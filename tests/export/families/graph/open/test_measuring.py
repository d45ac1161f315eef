"""Known sizes of a graph, and axes that become longer where a segment does, by folding copies of it."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from folding import fold
from onnx import TensorProto, helper, numpy_helper
from small_graphs import model, value
from txl_export.families.graph.open.measuring import Sizes


def sizes_of(proto: onnx.ModelProto, segment: dict[str, int]):
    graph = ir.from_proto(proto)
    return Sizes(graph, segment, fold), {output.name: output for node in graph.graph for output in node.outputs}


def numbers(name: str, *given: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(given), name)


def turned(shape, constants=(), *nodes: onnx.NodeProto) -> onnx.ModelProto:
    """x as [T, B, 6] to y, which has its positions at the end and is summed up; and more nodes."""
    first = helper.make_node("Transpose", ["x"], ["y"], perm=[1, 2, 0])
    last = helper.make_node("CumSum", ["y", "bands"], ["sums"])
    given = [numbers("bands", 1), *constants]
    return model([first, *nodes, last], [value("x", shape)], [value("sums", [shape[1], 6, shape[0]])], given)


@pytest.mark.parametrize("shape", [("T", "B", 6), (7, 2, 6), (7, "B", 6), (None, None, 6)])
def test_an_axis_is_followed_whether_its_length_is_open_or_a_number(shape):
    sizes, found = sizes_of(turned(shape), {"x": 0})
    assert [sizes.follows(found["y"], axis) for axis in range(4)] == [False, False, True, None]
    batch = shape[1] if shape[1] else "input x axis 1"
    assert sizes.of(found["y"]) == (batch, 6, 7 if shape[0] == 7 else None)


def test_where_the_axis_of_positions_is_not_known_nobody_can_tell_what_follows():
    sizes, found = sizes_of(turned(("T", "B", 6)), {})
    assert {sizes.follows(found["y"], axis) for axis in range(3)} == {None}
    assert sizes.of(found["y"]) == ("B", 6, "T")


def test_what_is_computed_of_an_open_size_is_not_taken_for_a_number():
    double = helper.make_node("Concat", ["y", "y"], ["z"], axis=0)
    more = helper.make_node("Pad", ["z", "pads"], ["p"])
    proto = turned(("T", "B", 6), [numbers("pads", 1, 0, 0, 0, 0, 0)], double, more)
    sizes, found = sizes_of(proto, {"x": 0})
    assert sizes.of(found["z"]) == sizes.of(found["p"]) == (None, 6, None)


@pytest.mark.parametrize(
    ("node", "constants"),
    [
        (helper.make_node("Reshape", ["y", "shape"], ["z"]), [numbers("shape", 12, 7)]),
        (helper.make_node("Slice", ["y", "a", "b", "c"], ["z"]), [numbers("a", 0), numbers("b", 7), numbers("c", 2)]),
    ],
    ids=["Reshape", "Slice"],
)
def test_constants_that_are_true_of_one_length_alone_leave_it_untold(node, constants):
    sizes, found = sizes_of(turned((7, 2, 6), constants, node), {"x": 0})
    assert sizes.follows(found["y"], 2) is None
    assert sizes.of(found["y"]) == (2, 6, 7)


def test_the_last_positions_of_a_segment_tell_nothing_against_it():
    last = helper.make_node("Slice", ["y", "a", "b", "c"], ["z"])
    constants = [numbers("a", -2), numbers("b", 2**63 - 1), numbers("c", 2)]
    sizes, found = sizes_of(turned((7, 2, 6), constants, last), {"x": 0})
    assert [sizes.follows(found[name], 2) for name in "yz"] == [True, False]


def test_sizes_that_are_computed_of_shapes_are_known_and_how_much_is_cut_off():
    """Two positions are dropped by the number of positions less two."""
    nodes = [
        helper.make_node("Shape", ["x"], ["length"], start=0, end=1),
        helper.make_node("Sub", ["length", "two"], ["end"]),
        helper.make_node("Slice", ["y", "none", "end", "two"], ["z"]),
    ]
    sizes, found = sizes_of(turned(("T", "B", 6), [numbers("two", 2), numbers("none", 0)], *nodes), {"x": 0})
    assert [sizes.less(found["y"], found["z"], axis) for axis in range(3)] == [0, 0, 2]


def test_what_is_always_the_same_is_known_with_its_type():
    nodes = [
        helper.make_node("Shape", ["x"], ["all"]),
        helper.make_node(
            "ConstantOfShape", ["all"], ["ones"], value=helper.make_tensor("v", TensorProto.INT64, [1], [1])
        ),
        helper.make_node("CumSum", ["ones", "bands"], ["counted"]),
    ]
    sizes, found = sizes_of(turned(("T", "B", 6), [], *nodes), {})
    assert (sizes.dtype(found["ones"]), sizes.dtype(found["y"])) == (ir.DataType.INT64, ir.DataType.FLOAT)
    assert (sizes.constant(found["ones"]) == 1).all()
    assert sizes.constant(found["y"]) is None


def test_what_two_sizes_differ_by_is_a_number_or_an_open_size():
    """A cache that grows by one row and one that grows by L; a mask over a cache and one more row goes with it."""
    inputs = [value("past", ["B", "P", 3]), value("x", ["B", "L", 3]), value("mask", ["B", "P + 1", 1])]
    nodes = [
        helper.make_node("Slice", ["x", "zero", "one", "one"], ["new"]),
        helper.make_node("Concat", ["past", "new"], ["longer"], axis=1),
        helper.make_node("Add", ["longer", "mask"], ["hidden"]),
        helper.make_node("Concat", ["past", "x"], ["long"], axis=1),
    ]
    proto = model(nodes, inputs, [value("hidden", None), value("long", None)], [numbers("zero", 0), numbers("one", 1)])
    graph = ir.from_proto(proto)
    ends = past, *_, one, many = [*graph.graph.inputs, *graph.graph.outputs]
    sizes = Sizes(graph, {}, fold, ends)
    assert (sizes.less(one, past, 1), sizes.less(many, past, 1), sizes.less(past, past, 1)) == (1, "L", 0)
    assert sizes.of(past) == ("B", "P", 3)


def test_sizes_that_do_not_go_together_leave_everything_unknown():
    plus = helper.make_node("Add", ["x", "seven"], ["y"])
    proto = model(
        [plus, helper.make_node("CumSum", ["y", "bands"], ["sums"])],
        [value("x", ["T", 6])],
        [value("sums", None)],
        [numpy_helper.from_array(np.zeros((7, 6), np.float32), "seven"), numbers("bands", 1)],
    )
    sizes, found = sizes_of(proto, {"x": 0})
    assert (sizes.of(found["y"]), sizes.follows(found["y"], 0)) == ((), None)


def test_a_table_with_a_row_for_each_position_ends_the_first_attempt_alone():
    """1,000 rows, of which as many are added as there are positions."""
    nodes = [
        helper.make_node("Shape", ["x"], ["length"], start=0, end=1),
        helper.make_node("Slice", ["table", "first", "length", "first"], ["rows"]),
        helper.make_node("Add", ["x", "rows"], ["placed"]),
        helper.make_node("CumSum", ["placed", "bands"], ["sums"]),
    ]
    table = numpy_helper.from_array(np.zeros((1000, 1, 6), np.float32), "table")
    given = [table, numbers("first", 0), numbers("bands", 1)]
    sizes, found = sizes_of(model(nodes, [value("x", ["T", "B", 6])], [value("sums", None)], given), {"x": 0})
    assert [sizes.follows(found["placed"], axis) for axis in range(3)] == [True, False, False]
