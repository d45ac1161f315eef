"""Programs of several positions, made of a step of one: what they compute, and what is in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import ShapeInferencePass
from txl_export.graphs import positions, state_parts
from txl_export.graphs.opening import open_batch
from txl_export.graphs.positions import UnliftedError, lifted
from txl_export.graphs.state_parts import take_apart
from txl_runtime.bundle.axes import Axes

LENGTH, WIDTH = 5, 4
Nodes = list[tuple[str, str, str, dict[str, Any]]]
"""Operator, what it reads, what it returns, both with spaces between, and attributes."""
DRAWS = np.random.default_rng(0)
MATRIX, FADE = DRAWS.normal(size=(WIDTH, WIDTH)).astype(np.float32), np.float32(0.5)
FADES = np.array([0.9, 0.3], np.float32).reshape(2, 1, 1)


def shift(size: int) -> Nodes:
    return [("MatMul", "x matrix", "wide", {}), ("Add", "wide h", "y", {}), ("Identity", "wide", "h_out", {})]


def decay(size: int) -> Nodes:
    return [("Mul", "h fade", "less", {}), ("Add", "less x", "h_out", {}), ("MatMul", "h_out matrix", "y", {})]


def cell(size: int) -> Nodes:
    """Two layers: the second reads the first, whose next value is tanh(x a + h a)."""
    return [
        ("MatMul", "x matrix", "xa", {}),
        ("MatMul", "h matrix", "ha", {}),
        ("Add", "xa ha", "sum", {}),
        ("Tanh", "sum", "h_out", {}),
        ("Mul", "g h_out", "product", {}),
        ("Sub", "product x", "g_out", {}),
        ("MatMul", "g_out matrix", "y", {}),
    ]


def swap(size: int) -> Nodes:
    """Two states that lead to one another alone."""
    return [("Add", "g x", "h_out", {}), ("Mul", "h fade", "g_out", {}), ("Sub", "h g", "y", {})]


def still(size: int) -> Nodes:
    return [("Add", "h x", "y", {}), ("Identity", "h", "h_out", {})]


def window(size: int) -> Nodes:
    """Three rows, w [B, 3, 4], that move by one; y is their product with weights."""
    return [
        ("Unsqueeze", "x one", "row", {}),
        ("Concat", "w row", "rows", {"axis": 1}),
        ("Slice", "rows one four one", "w_out", {}),
        ("Mul", "w_out taps", "weighed", {}),
        ("ReduceSum", "weighed one", "y", {"keepdims": 0}),
    ]


def stack(size: int) -> Nodes:
    """Two layers' states in s [2, B, 4], one of them handed on and one that fades."""
    return [
        ("Gather", "s first", "a", {"axis": 0}),
        ("Gather", "s second", "b", {"axis": 0}),
        ("Mul", "b fade", "less", {}),
        ("Add", "less a", "b_out", {}),
        ("Unsqueeze", "x nought", "x1", {}),
        ("Unsqueeze", "b_out nought", "b1", {}),
        ("Concat", "x1 b1", "s_out", {"axis": 0}),
        ("MatMul", "b_out matrix", "y", {}),
    ]


def matrix(size: int) -> Nodes:
    """m [B, 4, 4] fades and is added x xᵀ; y is x m. The shape of y is a size that follows from B."""
    return [
        ("Unsqueeze", "x two", "column", {}),
        ("Unsqueeze", "x one", "row", {}),
        ("Mul", "column row", "outer", {}),
        ("Mul", "m fade", "less", {}),
        ("Add", "less outer", "m_out", {}),
        ("MatMul", "row m_out", "read", {}),
        ("Reshape", "read shape", "y", {}),
    ]


def _layer(x: str, state: str) -> Nodes:
    """A head's state [2, 2] of two heads, which fades by a constant; q, k and v are x."""
    return [
        ("Tanh", x, f"{state}_t", {}),
        ("Reshape", f"{state}_t heads", f"{state}_x", {}),
        ("Unsqueeze", f"{state}_x last", f"{state}_k", {}),
        ("Unsqueeze", f"{state}_x two", f"{state}_q", {}),
        ("Mul", f"{state}_k {state}_q", f"{state}_kv", {}),
        ("Mul", f"{state}_kv fade", f"{state}_new", {}),
        ("Mul", f"fades {state}", f"{state}_less", {}),
        ("Add", f"{state}_less {state}_new", f"{state}_out", {}),
        ("MatMul", f"{state}_q {state}_out", f"{state}_read", {}),
        ("Reshape", f"{state}_read shape", f"{state}_y", {}),
    ]


def retention(size: int) -> Nodes:
    """Two layers."""
    return [*_layer("x", "h"), *_layer("h_y", "g"), ("MatMul", "g_y matrix", "y", {})]


def delta(size: int) -> Nodes:
    """The gated delta rule, whose decay and beta are a sigmoid of each head's x."""
    return [
        ("Reshape", "x heads", "k", {}),
        ("Unsqueeze", "k last", "column", {}),
        ("Slice", "k nought one two", "gate", {}),
        ("Sigmoid", "gate", "beta", {}),
        ("Unsqueeze", "beta last", "decay", {}),
        ("Mul", "m decay", "less", {}),
        ("Mul", "less column", "products", {}),
        ("ReduceSum", "products two", "known", {"keepdims": 0}),
        ("Sub", "k known", "lacks", {}),
        ("Mul", "lacks beta", "learnt", {}),
        ("Unsqueeze", "learnt two", "row", {}),
        ("Mul", "column row", "outer", {}),
        ("Add", "less outer", "m_out", {}),
        ("Mul", "m_out column", "weighed", {}),
        ("ReduceSum", "weighed two", "read", {"keepdims": 0}),
        ("Reshape", "read shape", "y", {}),
    ]


def read_twice(size: int) -> Nodes:
    """Nodes that no chunk is made of, because S' goes elsewhere, too."""
    return [
        *matrix(size)[:-1],
        ("ReduceMax", "m_out two", "most", {"keepdims": 0}),
        ("Add", "read most", "sum", {}),
        ("Reshape", "most shape", "y", {}),
    ]


STEPS: dict[str, tuple[Callable[[int], Nodes], dict[str, tuple[Any, ...]], Counter[str]]] = {
    "shift": (shift, {"h": ("B", 4)}, Counter(MatMul=1, Add=1)),
    "decay": (decay, {"h": ("B", 4)}, Counter(MatMul=1, Mul=LENGTH, Add=LENGTH)),
    "cell": (cell, {"h": ("B", 4), "g": ("B", 4)}, Counter(MatMul=2 + LENGTH, Tanh=LENGTH, Mul=LENGTH, Sub=LENGTH)),
    "swap": (swap, {"h": ("B", 4), "g": ("B", 4)}, Counter(Add=LENGTH, Mul=LENGTH, Sub=1)),
    "still": (still, {"h": ("B", 4)}, Counter(Add=1)),
    "window": (window, {"w": ("B", 3, 4)}, Counter(Mul=1, ReduceSum=1)),
    "stack": (stack, {"s": (2, "B", 4)}, Counter(MatMul=1, Mul=LENGTH, Add=LENGTH)),
    "matrix": (matrix, {"m": ("B", 4, 4)}, Counter(Add=2, Exp=1, Split=1)),
    "retention": (retention, {"h": ("B", 2, 2, 2), "g": ("B", 2, 2, 2)}, Counter(Exp=2, MatMul=11)),
    "delta": (delta, {"m": ("B", 2, 2, 2)}, Counter(Exp=1, Softplus=1, ReduceSum=0)),
    "read_twice": (read_twice, {"m": ("B", 4, 4)}, Counter(Exp=0, Add=LENGTH)),
}
"""A step, its states, and how often operators that compute stand in its program of 5 positions."""


def graph(name: str, size: int) -> ir.Model:
    """The step of x [size, 4] and its states."""
    make, states, _ = STEPS[name]
    made = [
        helper.make_node(op, read.split(), returns.split(), name=returns, **more)
        for op, read, returns, more in make(size)
    ]
    shapes = {"x": ("B", WIDTH), **states}
    inputs = [
        helper.make_tensor_value_info(one, TensorProto.FLOAT, Axes(shape).sizes(size, 1))
        for one, shape in shapes.items()
    ]
    names = ["y", *(f"{one}_out" for one in states)]
    outputs = [helper.make_tensor_value_info(one, TensorProto.FLOAT, None) for one in names]
    numbers = {
        "one": [1],
        "two": [2],
        "four": [4],
        "nought": [0],
        "first": 0,
        "second": 1,
        "shape": [size, WIDTH],
        "heads": [size, 2, 2],
        "last": [3],
    }
    constants = {one: np.array(values, np.int64) for one, values in numbers.items()}
    constants |= {"matrix": MATRIX, "fade": FADE, "taps": MATRIX[:3], "fades": FADES}
    stored = [numpy_helper.from_array(values, one) for one, values in constants.items()]
    opsets = [helper.make_opsetid("", 18)]
    model = helper.make_model(
        helper.make_graph(made, "g", inputs, outputs, stored), opset_imports=opsets, ir_version=10
    )
    found = ir.from_proto(onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True))
    ShapeInferencePass()(found)
    for value in list(found.graph.initializers.values()):
        if not value.uses():
            del found.graph.initializers[value.name]
    return found


def opened(name: str) -> ir.Model:
    """The step of any number of sequences."""
    found = graph(name, size=20)
    open_batch(found, graph(name, size=21), 20)
    return found


def program(name: str, batch: int, length: int = LENGTH, axes: Any = ("B", "L", WIDTH)) -> ir.Model:
    return lifted(opened(name), len(STEPS[name][1]), {"x": Axes(axes), "y": Axes(axes)}, batch, length)


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options).run(None, feeds)


def apart(name: str, batch: int, length: int = LENGTH, axes: Any = ("B", "L", WIDTH)) -> float:
    """Return the largest distance of a program from the step that runs position by position."""
    draws, states = np.random.default_rng(1), STEPS[name][1]
    feeds = {one: draws.normal(size=Axes(shape).sizes(batch, 0)).astype(np.float32) for one, shape in states.items()}
    x = draws.normal(size=Axes(axes).sizes(batch, length)).astype(np.float32)
    found, step, rows, held = run(program(name, batch, length, axes), {"x": x, **feeds}), graph(name, batch), [], feeds
    place = Axes(axes)
    for position in range(length):
        y, *after = run(step, {"x": np.take(x, position, place.positions[0]), **held})
        rows.append(y)
        held = dict(zip(states, after, strict=True))
    wanted = [np.stack(rows, place.positions[0]), *held.values()]
    return max(float(np.abs(one - other).max()) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", STEPS)
def test_a_program_is_the_step_position_by_position(name, batch):
    assert apart(name, batch) < 1e-5


@pytest.mark.parametrize("axes", [("L", "B", WIDTH), ("B", WIDTH, "L")])
def test_positions_may_stand_elsewhere(axes):
    assert max(apart("cell", batch, axes=axes) for batch in (1, 3)) < 1e-5


@pytest.mark.parametrize("length", [1, 2])
def test_short_segments(length):
    assert max(apart(name, 2, length) for name in STEPS) < 1e-5


@pytest.mark.parametrize("name", STEPS)
def test_what_no_state_leads_back_to_runs_once(name):
    wanted = STEPS[name][2]
    found = Counter(node.op_type for node in program(name, batch=3).graph)
    assert Counter({one: found[one] for one in wanted}) == wanted


def rows_in_another_order(lifting: Any) -> None:
    lifting._order = lambda place: []


def a_state_of_a_position_too_early(lifting: Any) -> None:
    last = lifting._last
    lifting._last = lambda state: lifting._piece(lifting._after[state], lifting._length - 2) or last(state)


def forgets_the_first_state(lifting: Any) -> None:
    handed_on = lifting._handed_on

    def forget(state: ir.Value) -> None:
        lifting._first[state] = lifting._piece(lifting._after[state], 0)
        handed_on(state)

    lifting._handed_on = forget


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("cell", rows_in_another_order),
        ("cell", a_state_of_a_position_too_early),
        ("shift", a_state_of_a_position_too_early),
        ("window", forgets_the_first_state),
    ],
)
def test_seeded_faults_are_seen(monkeypatch, name, fault):
    made = positions._Lifting.__init__

    def faulty(lifting: Any, *given: Any) -> None:
        fault(lifting)
        made(lifting, *given)

    monkeypatch.setattr(positions._Lifting, "__init__", faulty)
    assert apart(name, batch=3) > 1e-2


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["matrix", "retention", "delta"])
def test_chunks_are_as_near_to_float64_as_what_is_written_out(monkeypatch, name, batch):
    states, draws = STEPS[name][1], np.random.default_rng(2)
    first = {one: draws.normal(size=Axes(shape).sizes(batch, 0)) for one, shape in states.items()}
    segments = draws.normal(size=(3, batch, 70, WIDTH))
    wide = onnx.ModelProto.FromString(ir.to_proto(graph(name, batch)).SerializeToString())
    for one in (*wide.graph.input, *wide.graph.output, *wide.graph.value_info):
        one.type.tensor_type.elem_type = TensorProto.DOUBLE
    for one in wide.graph.initializer:
        if one.data_type == TensorProto.FLOAT:
            one.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(one).astype(np.float64), one.name))
    step, held, rows = ReferenceEvaluator(wide), first, []
    for x in np.concatenate(segments, 1).swapaxes(0, 1):
        y, *after = step.run(None, {"x": x, **held})
        rows.append(y)
        held = dict(zip(states, after, strict=True))
    wanted = [np.stack(rows, 1), *held.values()]
    ways = {"chunks": program(name, batch, 70)}
    monkeypatch.setattr(positions, "find_retention", lambda *given: None)
    ways["written out"] = program(name, batch, 70)
    assert len(ways["chunks"].graph) < len(ways["written out"].graph)
    for model in ways.values():
        states_now, parts = {one: value.astype(np.float32) for one, value in first.items()}, []
        for x in segments:
            y, *after = run(model, {"x": x.astype(np.float32), **states_now})
            parts.append(y)
            states_now = dict(zip(states, after, strict=True))
        for one, other in zip([np.concatenate(parts, 1), *states_now.values()], wanted, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max(), rtol=0)


@pytest.mark.parametrize("fades", [[0.9, -0.3], [0.9, 0.0], [1.1, 0.3]])
def test_a_decay_that_has_no_logarithm_or_grows_is_written_out(monkeypatch, fades):
    monkeypatch.setitem(globals(), "FADES", np.array(fades, np.float32).reshape(2, 1, 1))
    assert Counter(node.op_type for node in program("retention", 3).graph)["Exp"] == 0
    assert apart("retention", 3) < 1e-4


def test_a_window_is_a_state_of_each_row():
    model = opened("window")
    (whole,) = take_apart(model, 1)
    assert [value.name for value in model.graph.inputs] == ["x", "w.0", "w.1", "w.2"]
    assert (whole.axis, whole.added, len(model.graph.outputs)) == (1, False, 4)


def test_a_window_of_more_rows_than_a_node_may_have_results_stays_whole(monkeypatch):
    monkeypatch.setattr(state_parts, "SIDES", 2)
    assert take_apart(opened("window"), 1) == []
    assert apart("window", 3) < 1e-5


def test_sequences_that_stand_nowhere_known_are_refused():
    model, axes = opened("decay"), Axes(("B", "L", WIDTH))
    model.graph.outputs[1].shape = ir.Shape([None, None])
    with pytest.raises(UnliftedError, match="where the sequences of 'h_out' stand is not known"):
        lifted(model, 1, {"x": axes, "y": axes}, 2, LENGTH)
