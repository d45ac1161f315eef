"""Bundles of small steps with state, their graphs written by hand: no exporter is needed to make one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file
from txl_runtime.bundle.open_batch import BATCH
from txl_runtime.bundle.tables import Input, Output, Program, StateTensor, TensorSpec

B = 3
KINDS = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int32": TensorProto.INT32,
    "bool": TensorProto.BOOL,
}


@dataclass
class StepModel:
    """The tables of a manifest, and the graphs of its programs.

    Attributes:
        stages: by program, the rows of each growing state and whether there are absent states; empty for others.
        tensors: of the weight file.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    states: tuple[StateTensor, ...]
    streams: str = "independent"
    lengths: str = "exact"
    stepwise: int | None = None
    graphs: dict[str, onnx.ModelProto] = field(default_factory=dict)
    programs: list[Program] = field(default_factory=list)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, name: str, length: int, graph: Graph, rows: dict[str, Any] | None = None, opset: int = 18) -> None:
        """A program; `rows` are those of each state that grows, before and after; None for a state that is absent."""
        given = [TensorSpec(name=i.name, dtype=i.dtype, shape=i.sizes(B, length)) for i in self.inputs]
        returned = [TensorSpec(name=o.name, dtype=o.dtype, shape=o.sizes(B, length)) for o in self.outputs]
        for state in self.states:
            before, after = (rows or {}).get(state.name, (0, 0)) or (None, 0)
            sizes = [list(state.shape), list(state.shape)]
            if state.rows is not None and before is not None:
                assert state.row_axis is not None
                sizes[0][state.row_axis], sizes[1][state.row_axis] = before, after
            if before is not None and 0 not in sizes[0]:
                given.append(TensorSpec(name=state.input, dtype=state.dtype, shape=tuple(sizes[0])))
            returned.append(TensorSpec(name=state.output, dtype=state.dtype, shape=tuple(sizes[1])))
        program = Program(
            name=name,
            kind="step",
            segment_length=length,
            update="replace",
            file=f"{name}.onnx",
            inputs=tuple(given),
            outputs=tuple(returned),
        )
        self.programs.append(program)
        self.graphs[program.file] = graph.finish(program, opset)

    def leave_open(self) -> StepModel:
        """The same with B open: its graphs must not have B in their constants."""
        axes = {entry.name: entry.axes.batch for entry in (*self.inputs, *self.outputs)}
        axes |= {name: state.batch_axis for state in self.states for name in (state.input, state.output)}
        for graph in (model.graph for model in self.graphs.values()):
            for value in (*graph.input, *graph.output):
                axis = axes[value.name]
                assert axis is not None, value.name
                value.type.tensor_type.shape.dim[axis].dim_param = BATCH
        self.programs = [msgspec.structs.replace(program, open_batch=True) for program in self.programs]
        return self

    def write(self, path: Path) -> Path:
        """A bundle of it."""
        path.mkdir(parents=True)
        save_file(self.tensors or {"nothing": np.zeros(1, np.float32)}, path / "weights.safetensors")
        for name, graph in self.graphs.items():
            onnx.checker.check_model(graph, full_check=True)
            declared = onnx.shape_inference.infer_shapes(graph, data_prop=True)  # as exporters do
            (path / name).write_bytes(declared.SerializeToString())
        files = {
            file.name: {"size": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
            for file in sorted(path.iterdir())
        }
        document = {
            "format": "txl-deploy.bundle",
            "format_version": "2.0",
            "model_id": hashlib.sha256(b"".join(sorted(map(str.encode, files)))).hexdigest(),
            "batch_size": B,
            "precision": "fp32",
            "inputs": self.inputs,
            "outputs": self.outputs,
            "states": self.states,
            "programs": self.programs,
            "streams": self.streams,
            "lengths": self.lengths,
            "stepwise": self.stepwise,
            "family": {"name": "own_module"},
            "weights": "weights.safetensors",
            "files": files,
        }
        (path / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(document)))
        return path


class Graph:
    """Nodes and constants that become a graph with a program's inputs and outputs."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []

    def add(self, operator: str, inputs: Sequence[str], *outputs: str, **attributes: Any) -> str:
        """A node; the name of its first result."""
        names = outputs or (f"value.{len(self._nodes)}",)
        self._nodes.append(helper.make_node(operator, inputs, names, name=f"{operator}.{names[0]}", **attributes))
        return names[0]

    def constant(self, values: Any, dtype: Any = None) -> str:
        """The name of a constant."""
        name = f"constant.{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(np.array(values, dtype), name))
        return name

    def finish(self, program: Program, opset: int) -> onnx.ModelProto:
        """The graph."""
        sides = (
            [helper.make_tensor_value_info(spec.name, KINDS[spec.dtype], spec.shape) for spec in side]
            for side in (program.inputs, program.outputs)
        )
        graph = helper.make_graph(self._nodes, program.name, *sides, self._constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


WIDTH, FEATURES = 6, 5


def recurrent(lengths: tuple[int, ...] = (4, 1)) -> StepModel:
    """An LSTM over features, with a counter and a flag: state of three types, the batch at two places."""
    model = StepModel(
        inputs=(
            Input(name="obs", dtype="float32", shape=("B", "L", FEATURES), role="feature"),
            Input(name="starts", dtype="bool", shape=("B",), role="feature"),
            Input(name="valid", dtype="int32", shape=("B",), role="valid"),
        ),
        outputs=(
            Output(name="best", dtype="float32", shape=("B", "L", 2), role="value"),
            Output(name="which", dtype="int32", shape=("B", "L", 2)),
            Output(name="total", dtype="float32", shape=("L", "B")),
            Output(name="known", dtype="bool", shape=("B",)),
        ),
        states=(
            state("c", (1, B, WIDTH), 1),
            state("count", (B,), 0, "int32", initial=7.0),
            state("h", (1, B, WIDTH), 1, initial="initial.h"),
            state("seen", (B,), 0, "bool"),
        ),
        tensors={"initial.h": np.linspace(-1, 1, WIDTH, dtype=np.float32).reshape(1, WIDTH)},
    )
    draws = np.random.default_rng(0)
    weights = [draws.normal(size=(1, 4 * WIDTH, columns)).astype(np.float32) for columns in (FEATURES, WIDTH)]
    for length in lengths:
        graph = Graph()
        live = graph.add("Greater", ["valid", graph.constant(0, np.int32)])
        wide = graph.add("Reshape", [live, graph.constant([1, -1, 1], np.int64)])
        fresh = graph.add("And", ["starts", live])
        fresh_wide = graph.add("Reshape", [fresh, graph.constant([1, -1, 1], np.int64)])
        began = [
            graph.add("Where", [fresh_wide, graph.constant(0, np.float32), f"state.{name}.in"]) for name in ("h", "c")
        ]
        time_first = graph.add("Transpose", ["obs"], perm=[1, 0, 2])
        w, r = (graph.constant(matrix) for matrix in weights)
        graph.add("LSTM", [time_first, w, r, "", "", *began], "y", "h", "c", hidden_size=WIDTH)
        y = graph.add("Squeeze", ["y", graph.constant([1], np.int64)])
        graph.add("ReduceSum", [y, graph.constant([2], np.int64)], "total", keepdims=0)
        y = graph.add("Transpose", [y], perm=[1, 0, 2])
        graph.add("TopK", [y, graph.constant([2], np.int64)], "best", "which.64", axis=-1)
        graph.add("Cast", ["which.64"], "which", to=TensorProto.INT32)
        for name in ("h", "c"):
            graph.add("Where", [wide, name, f"state.{name}.in"], f"state.{name}.out")
        graph.add("Add", ["state.count.in", "valid"], "state.count.out")
        graph.add("Or", ["state.seen.in", fresh], "state.seen.out")
        graph.add("And", ["state.seen.in", live], "known")
        model.add(f"step-{length}", length, graph)
    return model


ROWS, VOCABULARY = 5, 11


def growing(length: int = 2) -> StepModel:
    """Rows that become more up to 5, a tensor that is absent at first, and a clock that all sequences share."""
    model = StepModel(
        inputs=(Input(name="tokens", dtype="int32", shape=("B", "L"), role="tokens", vocab=VOCABULARY),),
        outputs=(Output(name="mean", dtype="float32", shape=("B", "L", 4)),),
        states=(
            state("clock", (1,), None, "int32", initial=3.0),
            state("rows", (B, ROWS, 4), 0, row_axis=1, rows=(0, ROWS)),
            state("summary", (2, B, 3), 1, absent=True),
        ),
        streams="lockstep",
    )
    draws = np.random.default_rng(0)
    table, mix = (draws.normal(size=size).astype(np.float32) for size in ((VOCABULARY, 4), (4, 3)))
    rows, stage = 0, 0
    while True:
        graph, after = Graph(), min(rows + length, ROWS)
        words = graph.add("Gather", [graph.constant(table), "tokens"], axis=0)
        every = graph.add("Concat", ["state.rows.in", words], axis=1) if rows else words
        ends = [graph.constant([place], np.int64) for place in (rows + length - after, rows + length, 1)]
        graph.add("Slice", [every, *ends], "state.rows.out")
        mean = graph.add("ReduceMean", [every, graph.constant([1], np.int64)], keepdims=1)
        mixed = graph.add("MatMul", [graph.add("Squeeze", [mean, graph.constant([1], np.int64)]), graph.constant(mix)])
        pair = graph.add("Unsqueeze", [mixed, graph.constant([0], np.int64)])
        pair = graph.add("Concat", [pair, graph.add("Neg", [pair])], axis=0)
        if stage:
            graph.add("Add", [pair, graph.add("Mul", ["state.summary.in", graph.constant(0.5, np.float32)])], "summary")
            seen = graph.add("ReduceSum", ["state.summary.in", graph.constant([0, 2], np.int64)], keepdims=0)
            seen = graph.add("Reshape", [seen, graph.constant([B, 1, 1], np.int64)])
            words = graph.add("Add", [words, seen])
        graph.add("Identity", ["summary" if stage else pair], "state.summary.out")
        graph.add("Add", [words, mean], "mean")
        graph.add("Add", ["state.clock.in", graph.constant([1], np.int32)], "state.clock.out")
        absent = None if stage == 0 else (0, 0)
        model.add(f"step-{length}.{stage}", length, graph, {"rows": (rows, after), "summary": absent})
        if after == rows:
            return model
        rows, stage = after, stage + 1


def counting(lengths: tuple[int, ...] = (4, 1)) -> StepModel:
    """Log-probabilities of tokens by how often they were seen; segments of any length."""
    model = StepModel(
        inputs=(
            Input(name="tokens", dtype="int32", shape=("B", "L"), role="tokens", vocab=VOCABULARY),
            Input(name="valid", dtype="int32", shape=("B",), role="valid"),
        ),
        outputs=(Output(name="logits", dtype="float32", shape=("B", "L", VOCABULARY), role="logprobs"),),
        states=(state("seen", (B, VOCABULARY), 0, initial="initial.seen"),),
        lengths="valid",
        stepwise=max(lengths),
        tensors={"initial.seen": np.linspace(0, 1, VOCABULARY, dtype=np.float32)},
    )
    for length in lengths:
        graph = Graph()
        places = graph.constant(np.arange(length, dtype=np.int32)[None])
        counts = graph.add("Less", [places, graph.add("Unsqueeze", ["valid", graph.constant([1], np.int64)])])
        counts = graph.add("Cast", [counts], to=TensorProto.FLOAT)
        counts = graph.add("Unsqueeze", [counts, graph.constant([2], np.int64)])
        ids = graph.add("Unsqueeze", ["tokens", graph.constant([2], np.int64)])
        hot = graph.add("Equal", [ids, graph.constant(np.arange(VOCABULARY, dtype=np.int32)[None, None])])
        hot = graph.add("Mul", [graph.add("Cast", [hot], to=TensorProto.FLOAT), counts])
        so_far = graph.add("CumSum", [hot, graph.constant(1, np.int64)])
        before = graph.add("Unsqueeze", ["state.seen.in", graph.constant([1], np.int64)])
        graph.add("LogSoftmax", [graph.add("Add", [so_far, before])], "logits", axis=-1)
        seen = graph.add("ReduceSum", [hot, graph.constant([1], np.int64)], keepdims=0)
        graph.add("Add", ["state.seen.in", seen], "state.seen.out")
        model.add(f"step-{length}", length, graph)
    return model


def state(
    name: str, shape: tuple[int, ...], batch_axis: int | None, dtype: Any = "float32", **more: Any
) -> StateTensor:
    return StateTensor(
        name=name,
        input=f"state.{name}.in",
        output=f"state.{name}.out",
        dtype=dtype,
        shape=shape,
        batch_axis=batch_axis,
        update="replace",
        **more,
    )


MODELS = {"recurrent": recurrent, "growing": growing, "counting": counting}
