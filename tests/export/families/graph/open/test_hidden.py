"""Hidden states made explicit: the opened graph, called segment by segment, is the graph over the whole sequence."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import foreign_graphs as graphs
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from folding import fold
from foreign_graphs import B, Case, D, H, step
from onnx import TensorProto, helper, numpy_helper
from small_graphs import model, value
from torch import nn
from torch.nn import functional
from txl_export.families.graph.open.hidden import Hidden, forgets, open_hidden
from txl_export.families.graph.take.reading import read_foreign
from txl_export.families.graph.take.running import Helper
from txl_runtime.errors import CheckpointError, UsageError

TOTAL, UNEVEN = 28, (1, 7, 3, 17)
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
Arrays = dict[str, np.ndarray]


def constants(**arrays) -> list[onnx.TensorProto]:
    """Initializers: of arrays, or drawn for a shape."""
    draws = np.random.default_rng(1)
    return [
        numpy_helper.from_array(
            draws.normal(0, 0.4, each).astype(np.float32) if isinstance(each, tuple) else each, name
        )
        for name, each in arrays.items()
    ]


def weights(op: str, name: str = "", inner: int = D) -> list[onnx.TensorProto]:
    rows = GATES[op] * H
    shapes = {f"w{name}": (1, rows, inner), f"r{name}": (1, rows, H), f"b{name}": (1, 2 * rows)}
    return constants(**shapes)


def recurrent(op: str, rest: Sequence[str] = (), outputs: Sequence[str] = ("four",), name: str = "cell", **more) -> Any:
    """A node over x as [T, B, D], whose result has an axis of directions, and the node that takes it away."""
    node = helper.make_node(op, ["x", "w", "r", "b", *rest], outputs, name, hidden_size=H, **more)
    return [node, helper.make_node("Squeeze", ["four", "one"], ["y"], "squeeze")]


ONE = numpy_helper.from_array(np.array([1]), "one")
X, Y = value("x", ["T", "B", D]), value("y", ["T", "B", H])


def alone(op: str, rest: Sequence[str] = (), more: Sequence[onnx.TensorProto] = (), **attributes) -> onnx.ModelProto:
    return model(recurrent(op, rest, **attributes), [X], [Y], [*weights(op), ONE, *more])


def convolved(nodes: Sequence[onnx.NodeProto], x: Sequence[Any] = ("B", D, "T"), **arrays) -> onnx.ModelProto:
    return model(nodes, [value("x", x)], [value("y", None)], constants(**arrays))


def conv(given: str = "x", made: str = "y", name: str = "conv", weight: str = "w", **more) -> onnx.NodeProto:
    return helper.make_node("Conv", [given, weight], [made], name, **more)


def cut(given: str, made: str) -> onnx.NodeProto:
    return helper.make_node("Slice", [given, "zero", "end", "axis"], [made], "cut")


def running(proto: onnx.ModelProto):
    """The graph as a function from inputs to outputs by name."""
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    whole = {given.name for given in session.get_inputs() if given.type == "tensor(int64)"}

    def run(feeds):
        given = {name: array.astype(np.int64) if name in whole else array for name, array in feeds.items()}
        return dict(zip(names, session.run(None, given), strict=True))

    return run


def opened(proto: onnx.ModelProto, segment: Mapping[str, int] = {}) -> tuple[onnx.ModelProto, list[Hidden]]:
    graph = ir.from_proto(proto)
    found = open_hidden(graph, segment, fold)
    made = ir.to_proto(graph)
    known = {each.name for each in (*made.graph.input, *made.graph.initializer)} | {""}
    for node in made.graph.node:  # in an order that can be run, and each name once
        assert {*node.input} <= known
        assert not {*node.output} & (known - {""})
        known |= {*node.output}
    return made, found


def first(found: Sequence[Hidden], batch: int = B) -> Arrays:
    """Return the states' initial values."""
    shapes = {state.input: [batch if size == "B" else size for size in state.shape] for state in found}
    return {
        state.input: np.zeros(shapes[state.input], np.float32)
        if state.initial is None
        else np.broadcast_to(state.initial, shapes[state.input]).astype(np.float32)
        for state in found
    }


def chained(run, found: Sequence[Hidden], feeds: Arrays, axis: int, lengths: Sequence[int], along: int) -> np.ndarray:
    """Results y of one segment after another, joined; each input has its positions along an axis."""
    states, made = first(found), []
    for start, length in zip(itertools.accumulate(lengths, initial=0), lengths, strict=False):
        cuts = {name: np.take(array, range(start, start + length), axis) for name, array in feeds.items()}
        results = run({**cuts, **states})
        states = {state.input: results[state.output] for state in found}
        made.append(results["y"])
    return np.concatenate(made, along)


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def close(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and bool(np.abs(one - other).max() <= 1e-5 * np.abs(other).max())


def proven(
    proto: onnx.ModelProto, x: np.ndarray, axis: int, segment: bool = True, step: int = 1, along: int | None = None
) -> list[Hidden]:
    """The states of a graph, after the opened graph was held against it over segments of several lengths; the graph
    itself has to fail that.
    """
    made, found = opened(proto, {"x": axis} if segment else {})
    whole, run, along = running(proto)({"x": x})["y"], running(made), axis if along is None else along
    for lengths in ((step,) * (TOTAL // step), (7 * step,) * (TOTAL // 7 // step), [step * n for n in UNEVEN]):
        if sum(lengths) == x.shape[axis]:
            assert close(chained(run, found, {"x": x}, axis, lengths, along), whole)
    assert not close(chained(running(proto), [], {"x": x}, axis, [x.shape[axis] // 4] * 4, along), whole)
    return found


RECURRENCES = {
    "LSTM": ("LSTM", {}),
    "LSTM with a bound": ("LSTM", {"clip": 0.5}),
    "GRU": ("GRU", {"linear_before_reset": 0}),
    "GRU, reset behind the product": ("GRU", {"linear_before_reset": 1}),
    "RNN": ("RNN", {}),
    "RNN of Relu": ("RNN", {"activations": ["Relu"]}),
}


@pytest.mark.parametrize("name", RECURRENCES)
def test_a_recurrence_goes_on_where_it_stopped(name):
    op, more = RECURRENCES[name]
    found = proven(alone(op, **more), drawn(TOTAL, B, D), 0)
    kinds = "hc" if op == "LSTM" else "h"
    assert [(state.node, state.op, state.shape, state.initial) for state in found] == [
        ("cell", op, (1, "B", H), None) for _ in kinds
    ]
    assert [(state.input, state.output) for state in found] == [(f"cell.{kind}", f"new_cell.{kind}") for kind in kinds]


@pytest.mark.parametrize("op", GATES)
def test_layers_have_a_state_each(op):
    second = helper.make_node(op, ["one_layer", "w2", "r2", "b2"], ["four"], "/cell", hidden_size=H)
    lower = helper.make_node(op, ["x", "w", "r", "b"], ["lower"], "cell", hidden_size=H)
    between = helper.make_node("Squeeze", ["lower", "one"], ["one_layer"])
    last = helper.make_node("Squeeze", ["four", "one"], ["y"])
    proto = model([lower, between, second, last], [X], [Y], [*weights(op), *weights(op, "2", H), ONE])
    names = [state.input for state in proven(proto, drawn(TOTAL, B, D), 0)]
    assert names == (["cell.h", "cell.c", "cell_1.h", "cell_1.c"] if op == "LSTM" else ["cell.h", "cell_1.h"])


STARTS = {
    "constant": ([], constants(h=np.tile(np.linspace(-1, 1, H, dtype=np.float32), (1, B, 1))), ["h", "h"]),
    "expanded to the batch and to two layers": (
        [
            helper.make_node("Shape", ["x"], ["batch"], start=1, end=2),
            helper.make_node("Concat", ["two", "batch", "wide"], ["sizes"], axis=0),
            helper.make_node("Expand", ["both", "sizes"], ["expanded"]),
            helper.make_node("Slice", ["expanded", "one", "two", "zero"], ["h"]),
        ],
        constants(both=(1, 1, H), wide=np.array([H]), two=np.array([2]), zero=np.array([0])),
        ["h", ""],
    ),
    "one number": (
        [
            helper.make_node("Shape", ["x"], ["batch"], start=1, end=2),
            helper.make_node("Concat", ["batch", "one", "wide"], ["sizes"], axis=0),
            helper.make_node("Expand", ["number", "sizes"], ["turned"]),
            helper.make_node("Transpose", ["turned"], ["h"], perm=[1, 0, 2]),
        ],
        constants(number=np.float32([0.3]), wide=np.array([H])),
        ["h", ""],
    ),
    "one layer's of two": (
        [
            helper.make_node("Shape", ["x"], ["batch"], start=1, end=2),
            helper.make_node("Concat", ["one", "batch", "one"], ["sizes"], axis=0),
            helper.make_node("Tile", ["both", "sizes"], ["repeated"]),
            helper.make_node("Slice", ["repeated", "one", "two", "zero"], ["h"]),
        ],
        constants(both=(2, 1, H), two=np.array([2]), zero=np.array([0])),
        ["h", ""],
    ),
    "computed of constants": (
        [
            helper.make_node("Sin", ["pairs"], ["sines"]),
            helper.make_node("Transpose", ["sines"], ["turned"], perm=[0, 2, 1]),
            helper.make_node("Reshape", ["turned", "row"], ["first"]),
            helper.make_node("Shape", ["x"], ["batch"], start=1, end=2),
            helper.make_node("Concat", ["one", "batch", "wide"], ["sizes"], axis=0),
            helper.make_node("Expand", ["first", "sizes"], ["h"]),
        ],
        constants(pairs=(1, 2, H // 2), row=np.array([1, 1, H]), wide=np.array([H])),
        ["h", ""],
    ),
    "filled": (
        [
            helper.make_node("Shape", ["x"], ["batch"], start=1, end=2),
            helper.make_node("Concat", ["one", "batch", "wide"], ["sizes"], axis=0),
            helper.make_node("ConstantOfShape", ["sizes"], ["h"], value=numpy_helper.from_array(np.float32([0.7]))),
        ],
        [numpy_helper.from_array(np.array([H]), "wide")],
        ["", "h"],
    ),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_constant_first_state_is_what_the_state_begins_with(name):
    nodes, more, rest = STARTS[name]
    proto = model([*nodes, *recurrent("LSTM", ["", *rest])], [X], [Y], [*weights("LSTM"), ONE, *more])
    x = drawn(TOTAL, B, D)
    made, found = opened(proto, {"x": 0})
    given = [state.initial is not None for state in found]
    assert given == [bool(start) for start in rest]
    assert not {"Shape", "Expand", "Tile", "ConstantOfShape"} & {node.op_type for node in made.graph.node}
    assert all(state.initial.shape == (1, 1, H) for state in found if state.initial is not None)
    states, results = first(found), []
    for part in np.split(x, 4):
        results.append(running(made)({"x": part, **states}))
        states = {state.input: results[-1][state.output] for state in found}
    assert close(np.concatenate([each["y"] for each in results]), running(proto)({"x": x})["y"])


@pytest.mark.parametrize("returned", [True, False], ids=["returned", "used alone"])
def test_a_last_state_that_is_used_or_returned_already_stays_what_it_is(returned):
    nodes = recurrent("GRU", outputs=["four", "last"])
    nodes[-1] = helper.make_node("Squeeze", ["four", "one"], ["rows"])
    nodes.append(helper.make_node("Add", ["rows", "last"], ["y"]))
    outputs = [Y, value("last", [1, "B", H])] if returned else [Y]
    proto = model(nodes, [X], outputs, [*weights("GRU"), ONE])
    made, found = opened(proto, {"x": 0})
    x = drawn(TOTAL, B, D)
    before, run = running(proto)({"x": x}), running(made)
    half = run({"x": x[:14], **first(found)})
    result = run({"x": x[14:], "cell.h": half["new_cell.h"]})
    assert close(result["y"], before["y"][14:])
    assert [output.name for output in made.graph.output] == [*before, "new_cell.h"]
    if returned:
        assert (half["last"] == half["new_cell.h"]).all()
        assert close(result["last"], before["last"])


def test_a_recurrence_whose_last_state_alone_is_used_goes_on_with_it():
    node = helper.make_node("GRU", ["x", "w", "r", "b"], ["", "y"], "cell", hidden_size=H)
    proto = model([node], [X], [value("y", [1, "B", H])], weights("GRU"))
    made, found = opened(proto, {"x": 0})
    assert [(state.input, state.shape) for state in found] == [("cell.h", (1, "B", H))]
    x, run = drawn(TOTAL, B, D), running(made)
    half = run({"x": x[:14], **first(found)})
    assert close(run({"x": x[14:], "cell.h": half["new_cell.h"]})["y"], running(proto)({"x": x})["y"])


FRONT = np.array([0, 0, 8, 0, 0, 0])
CUT = {"zero": np.array([0]), "end": np.array([-8]), "axis": np.array([2])}
KERNEL = {"w": (D, D, 5)}
CONVOLUTIONS = {
    "its own padding": ([conv(pads=[8, 0], dilations=[2])], KERNEL, [8]),
    "with a bias": (
        [helper.make_node("Conv", ["x", "w", "b"], ["y"], "conv", pads=[4, 0])],
        {**KERNEL, "b": (D,)},
        [4],
    ),
    "of groups": ([conv(pads=[4, 0], group=3)], {"w": (D, D // 3, 5)}, [4]),
    "of each channel": ([conv(pads=[4, 0], group=D)], {"w": (2 * D, 1, 5)}, [4]),
    "behind a Pad": (
        [helper.make_node("Pad", ["x", "front"], ["p"]), conv("p", dilations=[2])],
        {**KERNEL, "front": FRONT},
        [8],
    ),
    "behind a Pad of one axis, with padding of its own": (
        [helper.make_node("Pad", ["x", "short", "", "last"], ["p"]), conv("p", dilations=[3], pads=[4, 0])],
        {**KERNEL, "short": np.array([8, 0]), "last": np.array([-1])},
        [12],
    ),
    "padded on both sides and cut": (
        [conv(pads=[8, 8], dilations=[2], made="m"), cut("m", "y")],
        {**KERNEL, **CUT},
        [8],
    ),
    "padded on both sides by a Pad and cut": (
        [helper.make_node("Pad", ["x", "both"], ["p"]), conv("p", "m", dilations=[2]), cut("m", "y")],
        {**KERNEL, **CUT, "both": np.array([0, 0, 8, 0, 0, 8])},
        [8],
    ),
    "stacked": (
        [
            conv(pads=[4, 4], made="m"),
            cut("m", "n"),
            helper.make_node("Relu", ["n"], ["o"]),
            conv("o", name="/conv", pads=[8, 0], dilations=[2]),
        ],
        {**KERNEL, **CUT, "end": np.array([-4])},
        [4, 8],
    ),
}


@pytest.mark.parametrize("segment", [True, False], ids=["the axis is known", "the axis is not known"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_reads_the_positions_of_the_call_before(name, segment):
    nodes, arrays, before = CONVOLUTIONS[name]
    found = proven(convolved(nodes, **arrays), drawn(B, D, TOTAL), 2, segment)
    assert [state.shape for state in found] == [("B", D, zeros) for zeros in before]
    assert [state.input for state in found] == ["conv.window", "conv_1.window"][: len(found)]


@pytest.mark.parametrize("zeros", [3, 4])
def test_a_convolution_with_a_stride_is_the_same_over_segments_of_its_multiples(zeros):
    nodes = [conv(pads=[zeros, 0], strides=[2])]
    found = proven(convolved(nodes, **KERNEL), drawn(B, D, 2 * TOTAL), 2, step=2)
    assert [state.shape for state in found] == [("B", D, zeros)]


def test_a_convolution_over_bands_too_keeps_what_surrounds_the_bands():
    """Two zeros in front of time, one on both sides of the bands, from a Pad and from the Conv."""
    arrays = {"w": (2, 1, 3, 3), "pads": np.array([0, 0, 2, 1, 0, 0, 0, 1]), "v": (1, 2, 2, 3)}
    nodes = [
        helper.make_node("Pad", ["x", "pads"], ["p"]),
        conv("p", "m", strides=[1, 2]),
        conv("m", name="other", weight="v", pads=[1, 1, 0, 1]),
    ]
    found = proven(convolved(nodes, ["B", 1, "T", 9], **arrays), drawn(B, 1, TOTAL, 9), 2)
    assert [state.shape for state in found] == [("B", 1, 2, 9), ("B", 2, 1, 5)]


def test_what_several_convolutions_read_is_carried_once():
    nodes = [
        conv(pads=[4, 0], made="a"),
        conv(pads=[4, 0], made="b", weight="v", name="other"),
        helper.make_node("Mul", ["a", "b"], ["y"]),
    ]
    found = proven(convolved(nodes, **KERNEL, v=(D, D, 5)), drawn(B, D, TOTAL), 2)
    assert [state.input for state in found] == ["conv.window"]


AXIS = numpy_helper.from_array(np.array(1), "along")


@pytest.mark.parametrize("more", [{}, {"exclusive": 1}], ids=["with its own position", "without"])
def test_a_sum_over_positions_goes_on(more):
    node = helper.make_node("CumSum", ["x", "along"], ["y"], "sums", **more)
    proto = model([node], [value("x", ["B", "T", D])], [value("y", None)], [AXIS])
    found = proven(proto, drawn(B, TOTAL, D), 1)
    assert [(state.input, state.op, state.shape) for state in found] == [("sums.sum", "CumSum", ("B", 1, D))]


def test_a_convolution_that_reads_a_sum_goes_on_with_it():
    """The value in a sum's place has its sizes."""
    node = helper.make_node("CumSum", ["x", "along"], ["sum"], "sums")
    along = np.array(2)
    found = proven(convolved([node, conv("sum", pads=[2, 0])], w=drawn(D, D, 3), along=along), drawn(B, D, TOTAL), 2)
    assert [state.op for state in found] == ["CumSum", "Conv"]


def mean(*count: onnx.NodeProto, more: Sequence[onnx.TensorProto] = ()) -> onnx.ModelProto:
    """The mean of x as [B, T, D] from the first position on, by a number "n" of positions."""
    nodes = [
        helper.make_node("Shape", ["x"], ["length"], start=1, end=2),
        helper.make_node("CumSum", ["x", "along"], ["s"], "sums"),
        *count,
        helper.make_node("Unsqueeze", ["n", "one"], ["rows"]),
        helper.make_node("Div", ["s", "rows"], ["y"]),
    ]
    return model(nodes, [value("x", ["B", "T", D])], [value("y", None)], [AXIS, ONE, *more])


COUNTS = {
    "a range of whole numbers": (
        [
            helper.make_node("Squeeze", ["length"], ["l"]),
            helper.make_node("Add", ["l", "along"], ["end"]),
            helper.make_node("Range", ["along", "end", "along"], ["whole"], "count"),
            helper.make_node("Cast", ["whole"], ["n"], to=TensorProto.FLOAT),
        ],
        "count.count",
        [1],
    ),
    "a range of floating numbers, three each": (
        [
            helper.make_node("Squeeze", ["length"], ["l"]),
            helper.make_node("Cast", ["l"], ["f"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["f", "three"], ["end"]),
            helper.make_node("Range", ["zero", "end", "three"], ["n0"], "count"),
            helper.make_node("Add", ["n0", "three"], ["n"]),
        ],
        "count.count",
        [1],
    ),
    "a sum of ones": (
        [
            helper.make_node("ConstantOfShape", ["length"], ["ones"], value=numpy_helper.from_array(np.float32([1]))),
            helper.make_node("CumSum", ["ones", "zeroth"], ["n"], "count"),
        ],
        "count.sum",
        [1],
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_mean_over_positions_goes_on_with_its_count(name):
    nodes, state, shape = COUNTS[name]
    more = constants(three=np.float32(3), zero=np.float32(0), zeroth=np.array(0))
    found = proven(mean(*nodes, more=more), drawn(B, TOTAL, D), 1)
    assert {(each.input, each.shape) for each in found} == {("sums.sum", ("B", 1, D)), (state, tuple(shape))}


def test_a_range_that_nothing_is_divided_by_is_left_as_it_is():
    """Indices of positions: with a count that went on they would point behind the end."""
    nodes = [
        helper.make_node("Shape", ["x"], ["all"], start=1, end=2),
        helper.make_node("Squeeze", ["all"], ["length"]),
        helper.make_node("Range", ["zero", "length", "along"], ["places"], "places"),
        helper.make_node("Gather", ["x", "places"], ["again"], axis=1),
        helper.make_node("CumSum", ["again", "along"], ["y"], "sums"),
    ]
    more = [AXIS, *constants(zero=np.array(0))]
    proto = model(nodes, [value("x", ["B", "T", D])], [value("y", None)], more)
    assert [state.input for state in proven(proto, drawn(B, TOTAL, D), 1)] == ["sums.sum"]


def transposed(given: str = "x", made: str = "y", **more) -> onnx.NodeProto:
    return helper.make_node("ConvTranspose", [given, "w", "b"], [made], "up", **{"strides": [4], **more})


TAIL = {"w": (D, 2, 9), "b": (2,)}
LENGTH = [
    helper.make_node("Shape", ["m"], ["all"], start=2, end=3),
    helper.make_node("Sub", ["all", "five"], ["end"]),
]
OVERLAPS = {
    "cut behind it": ([transposed(made="m"), cut("m", "y")], {**CUT, "end": np.array([-5])}),
    "cut by its own padding": ([transposed(pads=[0, 5])], {}),
    "cut by both": ([transposed(pads=[0, 2], made="m"), cut("m", "y")], {**CUT, "end": np.array([-3])}),
    "cut by what is computed": ([transposed(made="m"), *LENGTH, cut("m", "y")], {**CUT, "five": np.array([5])}),
    "cut less by more behind": ([transposed(pads=[0, 6], output_padding=[1])], {}),
    "wider than its positions": ([transposed(strides=[2], dilations=[2], pads=[0, 15])], {}),
    "with groups": ([transposed(pads=[0, 5], group=3)], {"w": (D, 2, 9), "b": (6,)}),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_results_of_a_transposed_convolution_overlap_those_of_the_next_call(name):
    nodes, more = OVERLAPS[name]
    arrays = {**TAIL, **more}
    arrays.pop("end", None) if "end" in {output for node in nodes for output in node.output} else None
    found = proven(convolved(nodes, **arrays), drawn(B, D, TOTAL), 2)
    channels = 6 if name == "with groups" else 2
    tail = 15 if name == "wider than its positions" else 5
    assert [(state.input, state.op, state.shape) for state in found] == [
        ("up.tail", "ConvTranspose", ("B", channels, tail))
    ]


def test_a_transposed_convolution_over_bands_too_keeps_what_it_drops_of_the_bands():
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], "up", pads=[0, 1, 2, 1], strides=[1, 2])
    found = proven(convolved([node], ["B", 2, "T", 5], w=(2, 3, 3, 3)), drawn(B, 2, TOTAL, 5), 2)
    assert [state.shape for state in found] == [("B", 3, 2, 9)]


def test_a_convolution_behind_a_pad_of_computed_numbers_is_opened_once_constants_are_folded():
    """The numbers as torch.onnx writes them: those of the last axis first, filled up with zeros and turned around."""
    nodes = [
        helper.make_node("ConstantOfShape", ["four"], ["rest"], value=numpy_helper.from_array(np.array([0]))),
        helper.make_node("Concat", ["said", "rest"], ["all"], axis=0),
        helper.make_node("Reshape", ["all", "pairs"], ["table"]),
        helper.make_node("Slice", ["table", "last", "least", "zero", "last"], ["turned"]),
        helper.make_node("Transpose", ["turned"], ["columns"], perm=[1, 0]),
        helper.make_node("Reshape", ["columns", "last"], ["numbers"]),
        helper.make_node("Cast", ["numbers"], ["pads"], to=TensorProto.INT64),
        helper.make_node("Pad", ["x", "pads", ""], ["p"]),
        conv("p"),
    ]
    whole = {"said": [4, 0], "four": [4], "pairs": [-1, 2], "last": [-1], "least": [-(2**63) + 1], "zero": [0]}
    arrays = {name: np.array(numbers) for name, numbers in whole.items()}
    proto = convolved(nodes, **KERNEL, **arrays)
    assert not [each for each in forgets(ir.from_proto(proto), {"x": 2}, fold) if not each.fault]
    found = proven(ir.to_proto(fold(ir.from_proto(proto))), drawn(B, D, TOTAL), 2)
    assert [state.shape for state in found] == [("B", D, 4)]


def test_what_forgets_is_what_is_opened_and_the_graph_stays_as_it_is():
    proto = mixed()
    graph = ir.from_proto(proto)
    found = forgets(graph, {"x": 2}, fold)
    assert ir.to_proto(graph) == ir.to_proto(ir.from_proto(proto))
    assert [(each.node, each.op, each.fault) for each in found] == [("conv", "Conv", ""), ("cell", "GRU", "")]
    assert {each.node for each in found} == {state.node for state in opened(proto, {"x": 2})[1]}
    (later,) = forgets(ir.from_proto(both_ways()), {"x": 0}, fold)
    assert "needs positions that come later" in later.fault


def mixed(time: Any = "T") -> onnx.ModelProto:
    """A GRU behind a convolution, with the convolution's zeros on both sides and cut: by a number of one length."""
    nodes = [conv(pads=[8, 8], dilations=[2], made="m"), cut("m", "n")]
    nodes.append(helper.make_node("Transpose", ["n"], ["t"], perm=[2, 0, 1]))
    nodes.append(helper.make_node("GRU", ["t", "wr", "r", "b"], ["four"], "cell", hidden_size=H))
    nodes.append(helper.make_node("Squeeze", ["four", "one"], ["y"]))
    cell = weights("GRU")
    cell[0].name = "wr"
    arrays = {**KERNEL, **CUT, "end": CUT["end"] if time == "T" else np.array([time])}
    return model(nodes, [value("x", ["B", D, time])], [value("y", None)], [*constants(**arrays), *cell, ONE])


def test_a_recurrence_behind_a_convolution_goes_on_with_it():
    names = [state.input for state in proven(mixed(), drawn(B, D, TOTAL), 2, along=0)]
    assert names == ["conv.window", "cell.h"]


def test_a_graph_of_one_length_is_opened_too():
    made, found = opened(mixed(7), {"x": 2})
    x = drawn(B, D, TOTAL)
    assert close(chained(running(made), found, {"x": x}, 2, [7] * 4, 0), running(mixed())({"x": x})["y"])


def test_what_torch_exports_is_opened(tmp_path):
    """Two layers that begin with zeros of the batch's size, a learned beginning, and convolutions of three forms."""

    def run(self, x):
        x = self.a(x)[..., :-4]
        x = self.b(functional.pad(x, (2, 0))).transpose(1, 2)
        x, _ = self.lstm(x)
        x, _ = self.gru(x, self.start.weight[:, None].repeat(1, x.shape[0], 1))
        return self.c(x[:, None])[:, :, :-2]

    layers = {
        "a": lambda: nn.Conv1d(D, D, 3, dilation=2, padding=4),
        "b": lambda: nn.Conv1d(D, D, 3),
        "c": lambda: nn.Conv2d(1, 2, (3, 3), padding=(2, 1)),
        "lstm": lambda: nn.LSTM(D, H, 2, batch_first=True),
        "gru": lambda: nn.GRU(H, H, batch_first=True),
        "start": lambda: nn.Embedding(1, H),
    }
    axes = {"x": {0: "B", 2: "T"}}
    path = tmp_path / "model.onnx"
    path.write_bytes(graphs.exported(Case(step(run, **layers), {"x": torch.randn(B, D, TOTAL)}, ("y",), {}, axes))[0])
    with Helper(foreign := read_foreign(path)) as helper:
        folded = ir.to_proto(helper.fold(foreign.model))
    found = proven(folded, drawn(B, D, TOTAL), 2)
    assert [state.op for state in found] == ["Conv", "Conv", *["LSTM"] * 4, "GRU", "Conv"]
    assert [state.initial is not None for state in found] == [False] * 6 + [True, False]


def untouched(proto: onnx.ModelProto, segment: Mapping[str, int]) -> bool:
    before = ir.to_proto(ir.from_proto(proto))
    made, found = opened(proto, segment)
    return found == [] and made == before


def test_a_graph_without_hidden_states_stays_as_it_is():
    given = model(
        recurrent("GRU", ["", "h"], ["four", "hn"]),
        [X, value("h", [1, "B", H])],
        [Y, value("hn", [1, "B", H])],
        [*weights("GRU"), ONE],
    )
    assert untouched(given, {"x": 0})
    assert untouched(convolved([conv()], **KERNEL), {"x": 2})
    assert untouched(onnx.load_from_string(graphs.scanned()), {"a": 0})
    assert untouched(looped("Loop", TensorProto.INT64), {"x": 0})


def test_a_convolution_whose_attributes_contradict_is_left_to_engines():
    for said in ({"dilations": [1, 1]}, {"strides": [1, 1]}):
        assert untouched(convolved([conv(pads=[4, 0], **said)], **KERNEL), {})


def test_a_convolution_that_looks_both_ways_is_left_as_it_is_where_its_axis_is_not_known():
    assert untouched(convolved([conv(pads=[2, 2])], **KERNEL), {})


def test_a_first_state_that_a_call_computes_is_left_to_it():
    nodes = [helper.make_node("ReduceMean", ["x", "zero"], ["mean"]), helper.make_node("MatMul", ["mean", "m"], ["h"])]
    more = constants(m=(D, H), zero=np.array([0]))
    assert untouched(model([*nodes, *recurrent("GRU", ["", "h"])], [X], [Y], [*weights("GRU"), ONE, *more]), {"x": 0})


def test_what_runs_over_bands_is_left_as_it_is():
    """A recurrence of both directions over bands, with positions among the sequences, as between calls of GTCRN; and a
    convolution over bands with zeros in front.
    """
    shape = {"flat": np.array([-1, 5, D]), "back": np.array([1, -1, 5, 2 * H])}
    nodes = [
        helper.make_node("Reshape", ["x", "flat"], ["rows"]),
        helper.make_node("Transpose", ["rows"], ["bands"], perm=[1, 0, 2]),
        helper.make_node("GRU", ["bands", "w", "r"], ["both"], "cell", hidden_size=H, direction="bidirectional"),
        helper.make_node("Transpose", ["both"], ["apart"], perm=[2, 0, 1, 3]),
        helper.make_node("Reshape", ["apart", "back"], ["y"]),
    ]
    arrays = {"w": (2, 3 * H, D), "r": (2, 3 * H, H), **shape}
    assert untouched(convolved(nodes, [1, "T", 5, D], **arrays), {"x": 1})
    assert untouched(convolved([conv(pads=[4, 0])], ["T", D, 9], **KERNEL), {"x": 0})


def test_a_graph_whose_parts_do_not_fit_is_refused_in_one_line():
    proto = alone("GRU")
    proto.graph.node[0].attribute.append(helper.make_attribute("direction", 0.5))
    with pytest.raises(CheckpointError, match=r"a graph whose parts do not fit together .*expected a valid one"):
        opened(proto)


def test_names_are_identifiers_of_their_own_and_the_same_each_time():
    nodes = recurrent("GRU", name="/net/1.rnn/GRU")
    nodes[1].output[0] = "net_1_rnn_GRU.h"
    proto = model(nodes, [X], [value("net_1_rnn_GRU.h", None)], [*weights("GRU"), ONE])
    (made, found), (again, _) = opened(proto), opened(proto)
    assert [(state.input, state.node) for state in found] == [("net_1_rnn_GRU_1.h", "/net/1.rnn/GRU")]
    assert made == again
    assert opened(model(recurrent("GRU", name="7"), [X], [Y], [*weights("GRU"), ONE]))[1][0].input == "GRU_7.h"


def padded(mode: str, filled: float = 0.0) -> onnx.ModelProto:
    pad = helper.make_node("Pad", ["x", "front", "filled"], ["p"], mode=mode)
    return convolved([pad, conv("p")], **KERNEL, front=FRONT // 2, filled=np.float32(filled))


def looped(op: str, kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """A sum, whose state is zeros at first; in a Loop of three positions."""
    state, given, made = value("s", [D], kind), value("e", [D], kind), value("u", [D], kind)
    inner = [helper.make_node("Add", ["s", "e"], ["t"]), helper.make_node("Identity", ["t"], ["u"])]
    if op == "Scan":
        body = helper.make_graph(inner, "body", [state, given], [value("t", [D], kind), made])
        node = helper.make_node("Scan", ["begin", "x"], ["end", "y"], "loop", num_scan_inputs=1, body=body)
    else:
        inner.insert(0, helper.make_node("Gather", ["x", "i"], ["e"]))
        inner.append(helper.make_node("Identity", ["c"], ["d"]))
        body = helper.make_graph(inner, "body", [*COUNT, state], [LAST, value("t", [D], kind), made])
        node = helper.make_node("Loop", ["times", "", "begin"], ["end", "y"], "loop", body=body)
    begin = np.zeros(D, np.float32 if kind == TensorProto.FLOAT else np.int64)
    return model(
        [node], [value("x", ["T", D], kind)], [value("y", None, kind)], constants(begin=begin, times=np.array(3))
    )


def decided_by_size() -> onnx.ModelProto:
    """A GRU in the branch of an If, which the number of sequences decides."""
    proto = onnx.load_from_string(graphs.branched())
    proto.graph.node.insert(0, helper.make_node("Size", ["x"], ["size"]))
    proto.graph.node[1].input[0] = "size"
    return proto


COUNT = [value("i", [], TensorProto.INT64), value("c", [], TensorProto.BOOL)]
LAST = value("d", [], TensorProto.BOOL)


def inside_loop() -> onnx.ModelProto:
    """A GRU in the body of a Loop that carries a count alone."""
    inner = [*recurrent("GRU"), helper.make_node("Identity", ["c"], ["d"])]
    body = helper.make_graph(inner, "body", COUNT, [LAST, value("y", None)])
    node = helper.make_node("Loop", ["times", ""], ["all"], "loop", body=body)
    times = value("times", [], TensorProto.INT64)
    return model([node], [times, X], [value("all", None)], [*weights("GRU"), ONE])


def both_ways() -> onnx.ModelProto:
    arrays = constants(w=(2, 3 * H, D), r=(2, 3 * H, H))
    node = helper.make_node("GRU", ["x", "w", "r"], ["y"], "cell", hidden_size=H, direction="bidirectional")
    return model([node], [X], [value("y", None)], arrays)


def unlike() -> onnx.ModelProto:
    return model(recurrent("GRU", ["", "h"]), [X], [Y], [*weights("GRU"), ONE, *constants(h=(1, B, H))])


def computed_padding(*computed: str) -> onnx.ModelProto:
    pad = helper.make_node("Pad", ["x", "pads", "", "axes"], ["p"])
    arrays = {"pads": np.array([4, 0]), "axes": np.array([2])}
    given = constants(**KERNEL, **{name: array for name, array in arrays.items() if name not in computed})
    inputs = [value("x", ["B", D, "T"]), *(value(name, [arrays[name].size], TensorProto.INT64) for name in computed)]
    return model([pad, conv("p")], inputs, [value("y", None)], given)


def padded_by(*pads: int) -> onnx.ModelProto:
    pad = helper.make_node("Pad", ["x", "pads"], ["p"])
    return convolved([pad, conv("p")], ["B", D - pads[1], "T"], **KERNEL, pads=np.array(pads))


def cut_by(more: Sequence[onnx.NodeProto] = (), pads=(4, 4), outputs: Sequence[str] = ("y",), **how) -> onnx.ModelProto:
    """A convolution with zeros on both sides, whose result is cut in another way than by as many on the right."""
    arrays = {**KERNEL, **CUT, "end": np.array([-4]), "steps": np.array([1]), **how}
    strides = arrays.pop("strides", [1])
    nodes = [conv(pads=pads, made="m", strides=strides)]
    nodes += [helper.make_node("Slice", ["m", "zero", "end", "axis", "steps"], ["y"]), *more]
    return model(nodes, [value("x", ["B", D, "T"])], [value(name, None) for name in outputs], constants(**arrays))


def without_rows() -> onnx.ModelProto:
    """A recurrence of twice as many sequences as there are in the inputs."""
    double = helper.make_node("Concat", ["x", "x"], ["xx"], axis=1)
    nodes = recurrent("GRU")
    nodes[0].input[0] = "xx"
    return model([double, *nodes], [X], [Y], [*weights("GRU"), ONE])


LATER = r"Conv 'conv' reads up to 4 positions that come later, expected zeros in front alone"
REFUSED = {
    "backwards": (alone("GRU", direction="reverse"), 0, r"GRU 'cell' is reverse, expected forward"),
    "both ways": (both_ways(), 0, r"GRU 'cell' is bidirectional, expected forward: it needs positions that come later"),
    "a start for each sequence": (unlike(), 0, r"GRU 'cell' begins with other numbers for each sequence"),
    "sizes that nobody knows": (
        without_rows(),
        0,
        r"GRU 'cell' has a state of sizes \[1, None, 8\], .*--fix NAME=SIZE",
    ),
    "a branch": (
        onnx.load_from_string(graphs.branched()),
        0,
        r"GRU 'b' begins anew inside If 'if', .*--fix NAME=VALUE",
    ),
    "a branch that a size decides": (
        decided_by_size(),
        0,
        r"GRU 'b' begins anew inside If 'if', .*choose one branch by --fix NAME=VALUE",
    ),
    "the body of a loop": (inside_loop(), 0, r"GRU 'cell' begins anew inside Loop 'loop', .*export a model without it"),
    "a Scan": (looped("Scan"), 0, r"Scan 'loop' carries what begins anew in every call"),
    "a Loop": (looped("Loop"), 0, r"Loop 'loop' carries what begins anew in every call"),
    "look-ahead": (convolved([conv(pads=[2, 2])], **KERNEL), 2, r"Conv 'conv' reads up to 2 positions that come later"),
    "look-ahead, cut too little": (cut_by(end=np.array([-3])), 2, LATER),
    "look-ahead, cut on the left too": (cut_by(zero=np.array([1])), 2, LATER),
    "look-ahead, cut by leaving out": (cut_by(steps=np.array([2])), 2, LATER),
    "look-ahead, cut beside another use": (
        cut_by([helper.make_node("Relu", ["m"], ["z"])], outputs=["y", "z"]),
        2,
        LATER,
    ),
    "look-ahead, cut behind a stride": (cut_by(strides=[2]), 2, LATER),
    "a mirror": (padded("reflect"), 2, r"Conv 'conv' is padded by reflect, expected a fixed number of zeros"),
    "the first position again": (padded("edge"), 2, r"Conv 'conv' is padded by edge"),
    "ones": (padded("constant", 1.0), 2, r"Conv 'conv' is padded by a number other than 0, expected .* zeros"),
    "computed padding": (computed_padding("pads"), 2, r"Conv 'conv' is padded by computed sizes"),
    "padding of computed axes": (computed_padding("axes"), 2, r"Conv 'conv' is padded by computed sizes"),
    "zeros among channels": (padded_by(0, 1, 4, 0, 0, 0), 2, r"Conv 'conv' is padded by more than positions"),
    "positions left out": (padded_by(0, 0, 4, 0, 0, -1), 2, r"Conv 'conv' is padded by more than positions"),
    "padding by its length": (
        convolved([conv(auto_pad="SAME_LOWER")], **KERNEL),
        2,
        r"Conv 'conv' is padded by auto_pad",
    ),
    "too many zeros": (convolved([conv(pads=[5, 0])], **KERNEL), 2, r"Conv 'conv' has 5 zeros in front, expected 4"),
    "too few zeros": (convolved([conv(pads=[3, 0])], **KERNEL), 2, r"Conv 'conv' has 3 zeros in front, expected 4"),
    "a sum from the end": (
        model(
            [helper.make_node("CumSum", ["x", "along"], ["y"], "sums", reverse=1)],
            [value("x", ["B", "T", D])],
            [value("y", None)],
            [AXIS],
        ),
        1,
        r"CumSum 'sums' sums up from the last position, expected from the first",
    ),
    "results that are dropped in front": (
        convolved([transposed(pads=[2, 3])], **TAIL),
        2,
        r"ConvTranspose 'up' drops its first 2 results, expected none: it needs positions that come later",
    ),
    "results of a given number": (
        convolved([transposed(auto_pad="SAME_UPPER")], **TAIL),
        2,
        r"ConvTranspose 'up' gives sizes of its own, expected a kernel and a stride",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_forgets_and_cannot_be_opened_is_refused_by_name(name):
    proto, axis, said = REFUSED[name]
    with pytest.raises(UsageError, match=said) as caught:
        opened(proto, {"x": axis})
    assert re.search(r"expected ", str(caught.value))
    assert "\n" not in str(caught.value)
