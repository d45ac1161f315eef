"""Further small steps with state, beside those of `step_models`: look-ahead, open rows, tokens in other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from onnx import TensorProto
from step_models import VOCABULARY, B, Graph, StepModel
from txl_runtime.bundle.tables import Input, Output, StateTensor

FRAME, AHEAD, MOST = 3, 2, 5


def write(model: StepModel, path: Path, **fields: Any) -> Path:
    """A bundle, with some fields of its manifest set."""
    model.write(path)
    place = path / "manifest.json"
    place.write_bytes(msgspec.json.encode(msgspec.json.decode(place.read_bytes()) | fields))
    return path


def looking(lengths: tuple[int, ...] = (4, 2)) -> StepModel:
    """Sums over a frame and the two behind it; all frames so far are the state, and an output without positions."""
    model = StepModel(
        inputs=(
            Input(name="frames", dtype="float32", shape=("L", "B", FRAME), role="feature", lookahead=AHEAD),
            Input(name="marks", dtype="int32", shape=("B", "L"), role="feature"),
            Input(name="gain", dtype="float32", shape=(FRAME,), role="feature"),
            Input(name="valid", dtype="int32", shape=("B",), role="valid"),
        ),
        outputs=(
            Output(name="near", dtype="float32", shape=("L", "B", FRAME)),
            Output(name="marked", dtype="int32", shape=("B", "L")),
            Output(name="sum", dtype="float32", shape=("B", FRAME), role="value"),
        ),
        states=(state("sum", (B, FRAME), 0, initial=-1.0), state("steps", (1, B), 1, "int32")),
    )
    for length in lengths:
        graph = Graph()
        parts = []
        for shift in range(AHEAD + 1):
            ends = [graph.constant([place], np.int64) for place in (shift, shift + length, 0)]
            parts.append(graph.add("Slice", ["frames", *ends]))
        graph.add("Mul", [graph.add("Sum", parts), "gain"], "near")
        graph.add("Add", ["marks", graph.add("Transpose", ["state.steps.in"], perm=[1, 0])], "marked")
        live = graph.add("Greater", ["valid", graph.constant(0, np.int32)])
        seen = graph.add("ReduceSum", [parts[0], graph.constant([0], np.int64)], keepdims=0)
        after = graph.add("Add", ["state.sum.in", seen])
        column = graph.add("Unsqueeze", [live, graph.constant([1], np.int64)])
        graph.add("Where", [column, after, "state.sum.in"], "state.sum.out")
        graph.add("Identity", ["state.sum.out"], "sum")
        graph.add("Add", ["state.steps.in", "valid"], "state.steps.out")
        model.add(f"step-{length}", length, graph)
    return model


def open_rows(lengths: tuple[int, ...] = (2, 1), full: bool = False) -> StepModel:
    """The newest 5 rows of what was seen, from none on, in one graph for any number of them.

    With `full` there is a graph of its own for one position where there are 5 rows already.
    """
    model = StepModel(
        inputs=(Input(name="frames", dtype="float32", shape=("B", "L", FRAME), role="feature"),),
        outputs=(Output(name="mean", dtype="float32", shape=("B", FRAME)),),
        states=(state("rows", (B, MOST, FRAME), 0, row_axis=1, rows=(0, MOST)),),
        streams="lockstep",
    )
    for length, rows in [*((length, "rows") for length in lengths), *([(1, MOST)] if full else [])]:
        graph = Graph()
        every = graph.add("Concat", ["state.rows.in", "frames"], axis=1)
        graph.add("ReduceMean", [every, graph.constant([1], np.int64)], "mean", keepdims=0)
        ends = [graph.constant([place], np.int64) for place in (-MOST, 2**40, 1)]
        graph.add("Slice", [every, *ends], "state.rows.out")
        name = f"step-{length}{'' if rows == 'rows' else '.full'}"
        model.add(name, length, graph, {"rows": (rows, rows)})
        if rows == MOST:
            continue
        written = model.graphs[f"{name}.onnx"].graph.output[1].type.tensor_type.shape.dim[1]
        written.dim_param = "rows.after"  # ONNX Runtime takes sizes of one name for the same size
    return model


def speaking(
    order: tuple[Literal["B", "L"], ...], lengths: tuple[int, ...] = (4, 1), streams: str = "independent"
) -> StepModel:
    """Log-probabilities by how often each token was seen, in any layout; segments are whole."""
    independent = streams == "independent"
    valid = (Input(name="valid", dtype="int32", shape=("B",), role="valid"),) if independent else ()
    model = StepModel(
        inputs=(Input(name="words", dtype="int32", shape=order, role="tokens", vocab=VOCABULARY), *valid),
        outputs=(Output(name="next", dtype="float32", shape=(*order, VOCABULARY), role="logprobs"),),
        states=(state("seen", (VOCABULARY, B), 1),),
        streams=streams,
    )
    for length in lengths:
        graph = Graph()
        ids = graph.add("Unsqueeze", ["words", graph.constant([len(order)], np.int64)])
        hot = graph.add("Equal", [ids, graph.constant(np.arange(VOCABULARY, dtype=np.int32))])
        hot = graph.add("Cast", [hot], to=TensorProto.FLOAT)
        before = graph.add("Transpose", ["state.seen.in"], perm=[1, 0])
        if "L" in order:
            axis = order.index("L")
            so_far = graph.add("CumSum", [hot, graph.constant(axis, np.int64)])
            wide = graph.add("Unsqueeze", [before, graph.constant([axis], np.int64)])
            total = graph.add("ReduceSum", [hot, graph.constant([axis], np.int64)], keepdims=0)
        else:
            so_far, wide, total = hot, before, hot
        graph.add("LogSoftmax", [graph.add("Add", [so_far, wide])], "next", axis=-1)
        after = graph.add("Add", ["state.seen.in", graph.add("Transpose", [total], perm=[1, 0])])
        if independent:
            live = graph.add("Greater", ["valid", graph.constant(0, np.int32)])
            graph.add("Where", [live, after, "state.seen.in"], "state.seen.out")
        else:
            graph.add("Identity", [after], "state.seen.out")
        model.add(f"step-{length}", length, graph)
    return model


def spoken(tokens: np.ndarray, before: np.ndarray | float = 0.0) -> np.ndarray:
    """Return the log-probabilities of `speaking` and `counting` after each token of [b, T]."""
    counts = np.cumsum(np.eye(VOCABULARY)[tokens], axis=1) + before
    return counts - np.log(np.exp(counts).sum(axis=-1, keepdims=True))


def state(
    name: str, shape: tuple[int, ...], batch_axis: int | None, dtype: Any = "float32", **more: Any
) -> StateTensor:
    """A row of the state table under the names that exports use."""
    names = {"input": f"state.{name}.in", "output": f"state.{name}.out"}
    return StateTensor(name=name, dtype=dtype, shape=shape, batch_axis=batch_axis, update="replace", **names, **more)
