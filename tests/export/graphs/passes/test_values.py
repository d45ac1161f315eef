"""Questions of passes about values have one answer, whatever form a node has."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper
from passed_graphs import small
from txl_export.graphs.passes.values import Block, block_of, constant, is_constant, numbers_of, size_along, slices_of


def _sliced(*numbers: Any) -> ir.Value:
    """The result of a Slice of x [4, 6], whose bounds, axes and steps are constants."""
    constants = {f"c.{place}": np.array(one, np.int64) for place, one in enumerate(numbers)}
    node = helper.make_node("Slice", ["x", *constants], ["y"], name="slice")
    return small([node], {"x": (4, 6)}, constants).graph[0].outputs[0]


@pytest.mark.parametrize(
    ("numbers", "block"),
    [
        (([1], [3], [1]), Block(1, 1, 3)),
        (([1], [3]), Block(0, 1, 3)),
        (([-2], [2**62], [-1], [1]), Block(1, 4, 6)),
        (([0], [6], [1], [2]), None),
        (([5], [0], [1], [-1]), None),
        (([3], [3], [1]), None),
        (([1, 1], [3, 3], [0, 1]), None),
    ],
)
def test_a_slice_is_a_block_where_it_takes_positions_in_a_row_along_one_axis(numbers: Any, block: Block | None) -> None:
    assert block_of(_sliced(*numbers)) == block


def test_a_slice_along_several_axes_says_what_it_takes_along_each() -> None:
    node = _sliced([1, 0], [3, 6], [-1, 0], [1, 2]).producer()
    assert node is not None
    assert slices_of(node) == {1: slice(1, 3, 1), 0: slice(0, 6, 2)}


def test_each_part_of_a_split_is_a_block() -> None:
    split = helper.make_node("Split", ["x", "sizes"], ["y", "z"], axis=-1, name="split")
    graph = small([split], {"x": (4, 6)}, {"sizes": np.array([2, 4])}, ["y", "z"]).graph
    assert [block_of(value) for value in graph[0].outputs] == [Block(1, 0, 2), Block(1, 2, 6)]


def test_a_constant_is_what_no_run_changes() -> None:
    nodes = [helper.make_node("Neg", ["c"], ["d"], name="neg"), helper.make_node("Mul", ["x", "d"], ["y"], name="mul")]
    graph = small(nodes, {"x": (2, "L")}, {"c": np.array([3], np.float32)}).graph
    x, c, d = graph.inputs[0], graph.initializers["c"], graph[0].outputs[0]
    assert [is_constant(value) for value in (x, c, d, graph[1].outputs[0], None)] == [False, True, True, False, False]
    assert constant(c) == np.array([3])
    assert constant(d) is None
    assert numbers_of(c) is None  # they are not whole
    assert [size_along(x, axis) for axis in (0, 1, 2, -2)] == [2, None, None, None]
