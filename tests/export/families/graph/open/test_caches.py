"""Caches that grow, cut to a window: the cut graph is the file fed with the cut cache."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from folding import fold
from onnx import TensorProto, helper, numpy_helper
from small_graphs import model, value
from txl_export.families.graph.open.caches import CutCache, by_hand, window_caches
from txl_runtime.errors import UsageError

B, D = 2, 3


def attention(
    names: tuple[str, ...] = ("past.k", "past.v", "present.k", "present.v"), masked: str = ""
) -> onnx.ModelProto:
    """x [B, L, D] looks at its own rows and at those of a cache; a mask, whose columns have a name, hides some."""
    past_k, past_v, present_k, present_v = names
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["k"]),
        helper.make_node("Neg", ["k"], ["v"]),
        helper.make_node("Concat", [past_k, "k"], [present_k], axis=1),
        helper.make_node("Concat", [past_v, "v"], [present_v], axis=1),
        helper.make_node("Transpose", [present_k], ["turned"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["x", "turned"], ["all"]),
        *([helper.make_node("Add", ["all", "mask"], ["scores"])] if masked else []),
        helper.make_node("Softmax", ["scores" if masked else "all"], ["chances"]),
        helper.make_node("MatMul", ["chances", present_v], ["y"]),
    ]
    inputs = [value("x", ["B", "L", D]), *(value(name, ["B", "past", D]) for name in names[:2])]
    inputs += [value("mask", ["B", 1, masked])] if masked else []
    outputs = [value("y", ["B", "L", D]), *(value(name, ["B", "total", D]) for name in names[2:])]
    weights = numpy_helper.from_array(np.random.default_rng(0).normal(size=(D, D)).astype(np.float32), "w")
    return model(nodes, inputs, outputs, [weights])


def started(graph: ir.Model):
    """The graph as a function from inputs to outputs by name."""
    proto = ir.to_proto(graph).SerializeToString()
    session = onnxruntime.InferenceSession(proto, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, feeds), strict=True))


@pytest.mark.parametrize("length", [1, 4])
def test_the_cut_graph_is_the_file_fed_with_the_cut_cache(length):
    graph = ir.from_proto(attention())
    cuts = window_caches(graph, {"past.k": 5, "past.v": 5}, {}, fold)
    assert cuts == [CutCache("past.k", "present.k", 1, 5), CutCache("past.v", "present.v", 1, 5)]
    assert [list(given.shape)[1] for given in graph.graph.inputs][1:] == [5, 5]
    run, file = started(graph), by_hand(started(ir.from_proto(attention())), cuts)
    held = own = {"past.k": np.zeros((B, 5, D), np.float32), "past.v": np.zeros((B, 5, D), np.float32)}
    draws = np.random.default_rng(1)
    for _ in range(8):
        x = draws.normal(size=(B, length, D)).astype(np.float32)
        found, wanted = run({"x": x, **held}), file({"x": x, **own})
        assert [*found] == [*wanted]
        assert all(found[name].shape == wanted[name].shape for name in found)
        assert max(np.abs(found[name] - wanted[name]).max() for name in found) <= 1e-6
        held, own = ({"past.k": each["present.k"], "past.v": each["present.v"]} for each in (found, wanted))
    assert held["past.k"].shape == (B, 5, D)
    assert not np.array_equal(held["past.k"][:, 0], held["past.k"][:, 1])


def test_a_mask_has_as_many_columns_as_the_cut_cache_and_the_new_rows():
    graph = ir.from_proto(attention(masked="past + L"))
    window_caches(graph, {"past.k": 5}, {}, fold)
    shapes = {given.name: [str(size) for size in given.shape] for given in graph.graph.inputs}
    assert shapes["mask"] == ["B", "1", "5 + L"]
    assert shapes["past.v"] == ["B", "5", str(D)]


def test_sizes_that_hang_together_without_saying_so_are_given():
    """A mask over "total" columns is one over past + L, which only the user knows."""
    with pytest.raises(UsageError, match="give sizes that hang together by --fix"):
        window_caches(ir.from_proto(attention(masked="total")), {"past.k": 5}, {}, fold)
    proto = attention(masked="total")
    for size in [size for given in proto.graph.input for size in given.type.tensor_type.shape.dim]:
        if size.dim_param in ("past", "L", "total"):
            size.dim_value = {"past": 5, "L": 1, "total": 6}[size.dim_param]
    assert window_caches(ir.from_proto(proto), {"past.k": 5}, {}, fold) == [CutCache("past.k", "present.k", 1, 5)]


def test_of_outputs_that_are_called_alike_the_user_says_which():
    names = "a", "b", "c", "d"
    with pytest.raises(UsageError, match=r"a may come back as c or d; give --state a=c, or another"):
        window_caches(ir.from_proto(attention(names)), {"a": 5}, {}, fold)
    (cut,) = window_caches(ir.from_proto(attention(names)), {"a": 5}, {"a": "d"}, fold)
    assert cut == CutCache("a", "d", 1, 5)


@pytest.mark.parametrize(
    ("windows", "states", "said"),
    [
        ({"none": 5}, {}, r"--window is none=5, expected an input that comes back longer"),
        ({"past.k": 5}, {"past.k": "y"}, r"--window is past.k=5, expected an input that comes back longer"),
        ({"past.k": 0}, {}, r"--window is past.k=0, expected a whole number of rows from 1"),
    ],
)
def test_what_does_not_grow_has_no_window(windows, states, said):
    with pytest.raises(UsageError, match=said):
        window_caches(ir.from_proto(attention()), windows, states, fold)


def test_of_a_graph_whose_states_stay_as_long_nothing_is_cut():
    proto = model(
        [helper.make_node("Add", ["x", "h"], ["y"])],
        [value("x", ["B", D]), value("h", ["B", D])],
        [value("y", ["B", D], TensorProto.FLOAT)],
    )
    assert window_caches(ir.from_proto(proto), {}, {}, fold) == []
    with pytest.raises(UsageError, match="and none is seen to"):
        window_caches(ir.from_proto(proto), {"h": 3}, {}, fold)
