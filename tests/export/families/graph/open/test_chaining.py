"""Segments may be parted, or not: told by what comes later, too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from folding import fold
from onnx import helper, numpy_helper
from small_graphs import model, value
from txl_export.families.graph.open.chaining import OpenedGraph, check_opened, divisible
from txl_export.families.graph.open.hidden import Hidden, open_hidden
from txl_export.families.graph.take.file_module import FileModule, FileStep, Side
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec
from txl_runtime.errors import CheckError, UsageError

D = 6


class Late(torch.nn.Module):
    """Sums up means of segments, and returns them from the 8th position on, times a number."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor, h: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[B, L], [B, 1] and [B, 1] → [B, L], [B, 1], [B, 1]."""
        return (x + torch.where(seen < 8, 0, h)) * self.scale, h + x.mean(1, keepdim=True), seen + x.shape[1]


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_a_segment_that_leaves_another_state_behind_is_told_by_the_next_ones(scale):
    """Results of 1e-6, as in SI units, are held against their own size."""
    states = [StateSpec("h", ("B", 1)), StateSpec("seen", ("B", 1))]
    spec = StepSpec(Late(scale), [InputSpec("x", ("B", "L"))], states, [OutputSpec("y", ("B", "L"))])
    assert not divisible(spec, 2, 8, 1)


class Running(torch.nn.Module):
    """Sums up."""

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[B, L] and [B, 1] → [B, L] and [B, 1]."""
        y = h + x.cumsum(1)
        return y, y[:, -1:]


@pytest.mark.parametrize(("length", "shorter"), [(8, 1), (8, 4), (6, 4)])
def test_segments_that_end_together_are_compared_where_one_is_no_multiple_of_the_other(length, shorter):
    spec = StepSpec(Running(), [InputSpec("x", ("B", "L"))], [StateSpec("h", ("B", 1))], [OutputSpec("y", ("B", "L"))])
    assert divisible(spec, 2, length, shorter)


def policy(first: float = 0.0) -> onnx.ModelProto:
    """One position [B, D] a call: two LSTMs that begin with a number in each call, between two products."""
    nodes = [
        helper.make_node("MatMul", ["x", "m"], ["wide"]),
        helper.make_node("Unsqueeze", ["wide", "zero"], ["rows"]),
        helper.make_node("LSTM", ["rows", "w", "r", "b", "", "h", "h"], ["lower"], "lower", hidden_size=D),
        helper.make_node("Squeeze", ["lower", "one"], ["between"]),
        helper.make_node("LSTM", ["between", "w", "r", "b"], ["upper"], "upper", hidden_size=D),
        helper.make_node("Squeeze", ["upper"], ["flat"]),
        helper.make_node("Reshape", ["flat", "shape"], ["top"]),
        helper.make_node("MatMul", ["top", "m"], ["y"]),
    ]
    draws = np.random.default_rng(0)
    shapes = {"m": (D, D), "w": (1, 4 * D, D), "r": (1, 4 * D, D), "b": (1, 8 * D)}
    arrays = {name: draws.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    arrays |= {"zero": np.array([0]), "one": np.array([1]), "shape": np.array([-1, D])}
    arrays["h"] = np.full((1, 1, D), first, np.float32)
    given = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    return model(nodes, [value("x", [1, D])], [value("y", [1, D])], given)


def started(graph: ir.Model):
    """The graph as a function from inputs to outputs by name."""
    proto = ir.to_proto(graph).SerializeToString()
    session = onnxruntime.InferenceSession(proto, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, feeds), strict=True))


def check(graph: ir.Model, hidden: Sequence[Hidden], file: onnx.ModelProto) -> None:
    """Hold an opened graph of one position a call against its file."""
    states = tuple(
        (
            Side(one.input, "float32", StateSpec(one.input, one.shape, initial=0.0 if one.initial is None else 0.5)),
            one.output,
        )
        for one in hidden
    )
    sides = Side("x", "float32", InputSpec("x", (1, D))), Side("y", "float32", OutputSpec("y", (1, D)))
    step = FileStep(sides[:1], sides[1:], states, 1, 1, frozenset())
    module = FileModule(step, started(graph), graph.graph, 0)
    whole = started(ir.from_proto(file))
    check_opened(step.spec(module), step, 1, (1,), whole, OpenedGraph(graph, hidden, started))


def opened(file: onnx.ModelProto) -> tuple[ir.Model, list[Hidden]]:
    graph = ir.from_proto(file)
    return graph, open_hidden(graph, {}, fold)


@pytest.mark.parametrize("first", [0.0, 0.5])
def test_one_position_a_call_is_shown_by_each_recurrence_alone(first):
    graph, hidden = opened(policy(first))
    assert [one.input for one in hidden] == ["lower.h", "lower.c", "upper.h", "upper.c"]
    check(graph, hidden, policy(first))


def crossed(graph: ir.Model) -> None:
    """The cell comes back as the hidden state."""
    outputs = {value.name: value for value in graph.graph.outputs}
    one, other = outputs["new_upper.h"], outputs["new_upper.c"]
    one.name, other.name = "between", one.name
    one.name = "new_upper.c"


def forgotten(graph: ir.Model) -> None:
    """The state comes back as it was."""
    value = next(value for value in graph.graph.inputs if value.name == "lower.c")
    at = next(at for at, value in enumerate(graph.graph.outputs) if value.name == "new_lower.c")
    graph.graph.outputs[at].name = "lost"
    node = ir.node("Identity", [value])
    node.outputs[0].name, node.outputs[0].type = "new_lower.c", value.type
    graph.graph.append(node)
    graph.graph.outputs[at] = node.outputs[0]


def elsewhere(graph: ir.Model) -> None:
    """Change a weight beside the recurrence, so that the file has others."""
    graph.graph.initializers["m"].const_value = ir.tensor(2 * graph.graph.initializers["m"].const_value.numpy())


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (crossed, r"(between|new_upper.h|new_upper.c|upper) is .* from LSTM 'upper' alone over 12 positions"),
        (forgotten, r"(lower|new_lower.[hc]|lost) is .* from LSTM 'lower' alone over 12 positions"),
        (elsewhere, r"y is .* from the file's own first call"),
    ],
)
def test_a_state_that_is_carried_wrongly_is_told_by_the_recurrence_alone(spoil, said):
    graph, hidden = opened(policy())
    spoil(graph)
    with pytest.raises(CheckError, match=said):
        check(graph, hidden, policy())


def test_a_convolution_of_one_position_a_call_is_shown_by_nothing():
    graph = ir.from_proto(policy())
    hidden = [Hidden("conv", "Conv", "conv.window", "new_conv.window", (1, D, 2), None)]
    with pytest.raises(UsageError, match=r"nothing shows that a chain is right, .* give --position-axis NAME=N"):
        check(graph, hidden, policy())


def test_a_file_that_does_not_run_over_several_segments_is_refused_with_the_engines_reason():
    graph, hidden = opened(policy())
    sides = Side("x", "float32", InputSpec("x", (1, "L", D))), Side("y", "float32", OutputSpec("y", (1, "L", D)))
    states = tuple((Side(one.input, "float32", StateSpec(one.input, one.shape)), one.output) for one in hidden)
    step = FileStep(sides[:1], sides[1:], states, 1, None, frozenset())
    spec = step.spec(FileModule(step, started(graph), graph.graph, 0))

    def whole(_):
        raise UsageError("f.onnx: does not run with x [1, 48, 6]: Reshape node")

    with pytest.raises(UsageError, match=r"does not run with 48 positions at once \(.*Reshape node\)"):
        check_opened(spec, step, 1, (8,), whole, OpenedGraph(graph, hidden, started))
