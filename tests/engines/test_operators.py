"""Every node of every program has a kernel for its types in every engine that the program may run in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import pytest
import torch
import txl_export
from onnx import TensorProto, helper
from small_graphs import INT32, model, program, value
from stand_ins.operators import TABLE, kernels, lacking, table
from step_models import MODELS
from support import cli
from txl_engines.adapting import without_clip, without_elu
from txl_engines.checking import read_graph
from txl_engines.composing import compose, whole_programs
from txl_export import InputSpec, StateSpec, StepSpec
from txl_runtime.bundle.reading import Bundle, open_bundle
from txl_runtime.bundle.tables import Program

pytestmark = pytest.mark.device

NEWEST = ("onnxruntime-cuda 1.31.1", "tensorrt 10.15", "tensorrt-rtx 1.7.1")
OLDER = ("onnxruntime-cuda 1.23.2", "tensorrt 10.1")
"""Know no ring."""
FAMILY: dict[str, dict[str, Any]] = {
    "plain": {},
    "adaptive": {"config": {"cutoffs": (20, 40)}},
    "divided embedding": {"config": {"cutoffs": (20, 40), "div_val": 2}},
    "large vocabulary": {"config": {"vocab_size": 1100, "cutoffs": (300, 700)}},
    "hidden memory": {"memory": "hidden"},
    "no memory": {"config": {"memory_length": 0}},
    "sinusoids added": {"config": {"attn_type": 2}},
    "learned distances": {"config": {"attn_type": 1, "position_rows": 9}},
    "learned positions": {"config": {"attn_type": 3, "position_rows": 16}},
    "zeros, pre-norm": {"config": {"memory_start": "zeros", "pre_lnorm": True}},
    "window and clamp": {"config": {"same_length": True, "clamp_length": 3}},
}
QUICK = {("adaptive", "bf16")}
CASES = [
    pytest.param(name, precision, marks=() if (name, precision) in QUICK else pytest.mark.slow(keep=3))
    for name in FAMILY
    for precision in ("fp32", "fp16", "bf16")
]


def graphs(bundle: Bundle, update: str) -> list[tuple[Program, onnx.ModelProto]]:
    """Every whole program."""
    programs = whole_programs(bundle.manifest, update)
    return [(item, onnx.load_model_from_string(compose(bundle, item))) for item in programs]


def libraries(update: str) -> tuple[str, ...]:
    return NEWEST if update == "ring" else (*NEWEST, *OLDER)


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_every_node_has_a_kernel_everywhere(make_bundle, name, precision):
    bundle = open_bundle(make_bundle(verify=False, batch_size=3, precision=precision, **FAMILY[name]))
    kinds = set()
    for update in bundle.manifest.updates:
        for item, graph in graphs(bundle, update):
            kinds.add(item.kind)
            needed, asked = kernels(graph), libraries(update)
            if precision == "fp32":  # the CPU has no arithmetic of bfloat16, and casts around that of float16
                asked = (*asked, "onnxruntime-cpu 1.31.1")
            for library in asked:
                assert not lacking(needed, library), f"{library} lacks operators of {item.name}"
    assert {"logprobs", "score"} <= kinds
    assert ("next" if name == "large vocabulary" else "last") in kinds


@pytest.mark.parametrize("kind", MODELS)
def test_steps_written_by_hand_have_kernels_too(tmp_path, kind):
    bundle = open_bundle(MODELS[kind]().write(tmp_path / "step.txl"))
    for item, graph in graphs(bundle, "replace"):
        for library in NEWEST:
            assert not lacking(kernels(graph), library), f"{library} lacks operators of {item.name}"


def clipped(opset: int = 18) -> onnx.ModelProto:
    """Ids, clipped as torch exports a clamp, and rows looked up by them."""
    nodes = [
        helper.make_node("Clip", ["tokens", "least", "most"], ["ids"], "the.clip"),
        helper.make_node("Gather", ["table", "ids"], ["rows"], "the.gather"),
    ]
    constants = [
        helper.make_tensor("least", INT32, [], [0]),
        helper.make_tensor("most", INT32, [], [4]),
        helper.make_tensor("table", TensorProto.FLOAT, [5, 2], range(10)),
    ]
    return model(nodes, [value("tokens", [2, 3], INT32)], [value("rows", [2, 3, 2])], constants, opset)


def test_a_clip_of_whole_numbers_is_named_as_lacking():
    wanted = ["the.clip: Clip (T=int32) of opset 18"]
    for library in ("onnxruntime-cuda 1.31.1", "onnxruntime-cuda 1.23.2", "tensorrt 10.1", "tensorrt 10.15"):
        assert lacking(kernels(clipped()), library) == wanted
    assert not lacking(kernels(clipped()), "tensorrt-rtx 1.7.1"), "it takes what is documented nowhere"


@pytest.mark.parametrize(
    ("ends", "operators"),
    [
        (["least", "most"], ["Max", "Min"]),
        (["least"], ["Max"]),
        (["", "most"], ["Min"]),
        ([], ["Identity"]),
    ],
)
def test_a_build_puts_max_and_min_in_its_place(tmp_path, ends, operators):
    before = clipped()
    before.graph.node[0].input[1:] = ends
    path = tmp_path / "small.onnx"
    path.write_bytes(before.SerializeToString())
    graph = read_graph(path.read_bytes(), program(before), tmp_path, 24)
    after = without_clip(graph)
    changed = onnx.load_model_from_string(after.data)
    onnx.checker.check_model(changed, full_check=True)
    assert [node.op_type for node in changed.graph.node] == [*operators, "Gather"]
    assert after.nodes == tuple((node.name, node.op_type) for node in changed.graph.node)
    assert after.sha256 == graph.sha256, "that of what was composed"
    ids = [[-9, 0, 2], [4, 5, 2**31 - 1]] if ends == ["least", "most"] else [[0, 1, 2], [3, 4, 0]]
    given = {"tokens": np.array(ids, np.int32)}
    one, two = (onnx.reference.ReferenceEvaluator(each).run(None, given)[0] for each in (before, changed))
    assert one.tolist() == two.tolist()


def test_a_clip_of_other_numbers_stays(tmp_path):
    nodes = [helper.make_node("Clip", ["x", "least"], ["y"])]
    constant = helper.make_tensor("least", TensorProto.FLOAT, [], [0.0])
    graph = model(nodes, [value("x", [2])], [value("y", [2])], [constant])
    path: Path = tmp_path / "small.onnx"
    read = read_graph(graph.SerializeToString(), program(graph), path.parent, 24)
    assert [operator for _, operator in without_clip(read).nodes] == ["Clip"]


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16])
@pytest.mark.parametrize("alpha", [None, 0.5])
def test_a_build_puts_an_exponential_in_place_of_an_elu(tmp_path, kind, alpha):
    nodes = [helper.make_node("Elu", ["x"], ["y"], "elu", **({} if alpha is None else {"alpha": alpha}))]
    before = model(nodes, [value("x", [6], kind)], [value("y", [6], kind)], [])
    read = read_graph(before.SerializeToString(), program(before), tmp_path, 24)
    after = without_elu(read)
    changed = onnx.load_model_from_string(after.data)
    onnx.checker.check_model(changed, full_check=True)
    assert "Elu" not in {operator for _, operator in after.nodes}
    assert after.sha256 == read.sha256, "that of what was composed"
    given = np.array([-900, -2, -0.1, 0, 0.1, 3], np.float32 if kind == TensorProto.FLOAT else np.float16)
    found = onnx.reference.ReferenceEvaluator(changed).run(None, {"x": given})[0]
    exact = np.where(given > 0, given, (alpha or 1.0) * np.expm1(np.minimum(given, 0).astype(np.float64)))
    np.testing.assert_allclose(found, exact, atol=1e-7 if kind == TensorProto.FLOAT else 1e-3)


class Layers(torch.nn.Module):
    """A GRU and two layers with ELU behind it, as policies have them."""

    def __init__(self):
        super().__init__()
        self.gru, self.value = torch.nn.GRU(6, 8), torch.nn.Linear(8, 1)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(14, 16), torch.nn.ELU(), torch.nn.Linear(16, 8), torch.nn.ELU()
        )
        self.scores = torch.nn.Linear(8, 3)

    def forward(self, x, h):
        x = x.clamp(-5, 5)
        rows, h = self.gru(x[None], h)
        rows = self.layers(torch.cat([rows[0], x], 1))
        return self.scores(rows), self.value(rows), h


@pytest.mark.slow
def test_layers_of_a_policy_build_though_the_compiler_fails_on_their_elu(tmp_path):
    pytest.importorskip("tensorrt_rtx")
    spec = StepSpec(Layers(), [InputSpec("x", ("B", 6))], [StateSpec("h", (1, "B", 8))], ["scores", "value"])
    made = txl_export.export(spec, tmp_path / "policy.txl", batch_size=4, verify=False)
    graph = (made.path / "step-1.onnx").read_bytes()
    assert "Elu" in {node.op_type for node in onnx.load_model_from_string(graph).graph.node}
    built = cli("build", made.path, "--target", "rtx", "--sm", 86)
    assert built.returncode == 0, built.stderr


def test_the_table_says_where_each_column_is_from():
    sources = json.loads((TABLE.parent / "sources.json").read_text())
    assert all(row.keys() == sources.keys() for row in table().values())
    assert {entry for row in table().values() for entry in row.values()} == {"yes", "no", "-"}
