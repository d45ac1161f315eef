"""Which sizes of a graph are known, and which axes become longer where a segment does; nothing is run for it."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper
from small_graphs import model, value
from txl_export.families.graph.open.lengths import Sizes


def sizes_of(proto: onnx.ModelProto, segment: dict[str, int] | None):
    graph = ir.from_proto(proto)
    return Sizes(graph, segment), {output.name: output for node in graph.graph for output in node.outputs}


def numbers(name: str, *given: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(given), name)


def turned(shape, constants=(), *nodes: onnx.NodeProto) -> onnx.ModelProto:
    """x as [T, B, 6] to y, which has its positions at the end; and more nodes."""
    first = helper.make_node("Transpose", ["x"], ["y"], perm=[1, 2, 0])
    return model([first, *nodes], [value("x", shape)], [value("y", [shape[1], 6, shape[0]])], constants)


@pytest.mark.parametrize("shape", [("T", "B", 6), (7, 2, 6), (7, "B", 6), (None, None, 6)])
def test_an_axis_is_followed_whether_its_length_is_open_or_a_number(shape):
    sizes, found = sizes_of(turned(shape), {"x": 0})
    assert [sizes.follows(found["y"], axis) for axis in range(4)] == [False, False, True, None]
    batch = shape[1] if shape[1] else "input x axis 1"
    assert sizes.of(found["y"]) == (batch, 6, 7 if shape[0] == 7 else None)


def test_without_an_axis_of_positions_nothing_follows_and_where_it_is_not_known_nobody_can_tell():
    for segment, told in (({}, False), (None, None)):
        sizes, found = sizes_of(turned(("T", "B", 6)), segment)
        assert {sizes.follows(found["y"], axis) for axis in range(3)} == {told}
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
