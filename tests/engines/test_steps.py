"""Engines of steps that return their whole state: built as they are, of every type, or refused by operator."""

from __future__ import annotations

from pathlib import Path

import msgspec
import onnx
import pytest
import small_graphs
from onnx import TensorProto, helper
from small_graphs import model, value
from step_models import MODELS, B, growing
from txl_engines.building import CompiledEngines
from txl_engines.bundles import build_bundle, choose_update
from txl_engines.composing import compose, whole_programs
from txl_runtime.bundle.engines.sidecar import read_sidecar
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.device.engines.library import load_library
from txl_runtime.errors import BundleError, UsageError
from txl_runtime.listener import Silent

every = pytest.mark.parametrize("kind", MODELS)


@every
def test_steps_are_whole_programs_and_are_built_of_the_bundle_s_own_bytes(tmp_path, kind):
    bundle = open_bundle(MODELS[kind]().write(tmp_path / "step.txl"))
    programs = whole_programs(bundle.manifest, "replace")
    assert programs == bundle.manifest.programs
    for each in programs:
        assert compose(bundle, each) == (bundle.path / each.file).read_bytes()


def test_a_step_of_any_number_of_rows_is_refused_with_what_to_do(tmp_path):
    made = growing()
    first = made.programs[1]
    rows = tuple(
        msgspec.structs.replace(spec, shape=tuple("rows" if size == 2 else size for size in spec.shape))
        if spec.name == "state.rows.in"
        else spec
        for spec in first.inputs
    )
    made.programs[1] = msgspec.structs.replace(first, inputs=rows)
    path = made.write(tmp_path / "open.txl")
    with pytest.raises(UsageError, match=r"step-2\.1 takes state\.rows\.in of any number of rows.*--growth stages"):
        build_bundle(path, "cuda")
    assert not (path / "engines").exists()


def test_steps_have_one_rule_and_others_are_refused_by_name():
    assert choose_update(("replace",), None, False, "tensorrt 10.0") == "replace"
    assert choose_update(("replace",), None, True, "tensorrt 11.4") == "replace"
    for rule in ("ring", "rolled"):
        for ring in (True, False):
            with pytest.raises(UsageError, match=f"--update is {rule}, but the steps .* leave --update out"):
                choose_update(("replace",), rule, ring, "tensorrt")
    with pytest.raises(UsageError, match="--update is replace, but the bundle's programs are rolled"):
        choose_update(("rolled",), "replace", True, "tensorrt")


@every
def test_graphs_for_onnx_runtime_are_written_and_listed(tmp_path, kind):
    path = MODELS[kind]().write(tmp_path / "step.txl")
    made = build_bundle(path, "cuda")
    bundle = open_bundle(path)
    assert made.update == "replace"
    for engine, program in zip(made.engines, bundle.manifest.programs, strict=True):
        assert engine.file == f"engines/cuda/{program.name}.onnx"
        assert (path / engine.file).read_bytes() == (path / program.file).read_bytes()
        facts = read_sidecar((path / engine.file).with_suffix(".json"))
        assert facts.identity.as_program().inputs == program.inputs
        assert (facts.attention_layers, facts.in_place) == (0, 0)
        bundle.check(engine.file)


@pytest.mark.slow
@every
def test_tensorrt_rtx_takes_lstm_counters_flags_and_the_largest_values(tmp_path, kind):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform or Python")
    path = MODELS[kind]().write(tmp_path / "step.txl")
    made = build_bundle(path, "rtx", gpus=(86, 120))
    assert [engine.program for engine in made.engines] == [
        program.name for program in open_bundle(path).manifest.programs
    ]
    for engine in made.engines:
        assert engine.sidecar.kernels
        assert engine.sidecar.verified_on
        assert (path / engine.file).stat().st_size == engine.sidecar.bytes
    assert all(engine.reused for engine in build_bundle(path, "rtx", gpus=(86, 120)).engines)


def _gru() -> onnx.ModelProto:
    nodes = [helper.make_node("GRU", ["x", "w", "r", "", "", "state.h.in"], ["", "state.h.out"], hidden_size=4)]
    nodes.append(helper.make_node("Relu", ["state.h.out"], ["y"]))
    weights = [
        helper.make_tensor(name, TensorProto.FLOAT, (1, 12, n), [0.1] * 12 * n) for name, n in (("w", 5), ("r", 4))
    ]
    state = [1, B, 4]
    return model(
        nodes,
        [value("x", [2, B, 5]), value("state.h.in", state)],
        [value("y", state), value("state.h.out", state)],
        weights,
    )


def _wide_integers() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Where", ["starts", "none", "state.n.in"], ["n"]),
        helper.make_node("Cast", ["n"], ["n.64"], to=TensorProto.INT64),
        helper.make_node("Mod", ["n.64", "three"], ["rest"]),
        helper.make_node("Cast", ["rest"], ["y"], to=TensorProto.INT32),
        helper.make_node("Add", ["n", "one"], ["state.n.out"]),
    ]
    numbers = [helper.make_tensor(name, TensorProto.INT32, (), [n]) for name, n in (("none", 0), ("one", 1))]
    numbers.append(helper.make_tensor("three", TensorProto.INT64, (), [3]))
    inputs = [value("starts", [B], TensorProto.BOOL), value("state.n.in", [B], TensorProto.INT32)]
    return model(
        nodes, inputs, [value("y", [B], TensorProto.INT32), value("state.n.out", [B], TensorProto.INT32)], numbers
    )


def _products() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Einsum", ["x", "x"], ["y"], equation="blf,bkf->blk"),
        helper.make_node("Identity", ["state.flag.in"], ["state.flag.out"]),
    ]
    flag = [value(f"state.flag.{end}", [B], TensorProto.BOOL) for end in ("in", "out")]
    return model(nodes, [value("x", [B, 2, 4]), flag[0]], [value("y", [B, 2, 2]), flag[1]])


def _make(graph: onnx.ModelProto, folder: Path) -> None:
    """Check and build a graph as one step."""
    described = small_graphs.program(graph, "replace", "step-2")
    maker = CompiledEngines(load_library("rtx"), "fp32")
    maker.make(maker.read(graph.SerializeToString(), described, folder), described, folder / "step.engine", Silent())


@pytest.mark.parametrize("graph", [_gru(), _wide_integers(), _products()], ids=["GRU", "int64 inside", "Einsum"])
def test_what_own_modules_hold_is_taken(tmp_path, graph):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform or Python")
    _make(graph, tmp_path)
    assert (tmp_path / "step.engine").stat().st_size > 1000


def _scatter() -> onnx.ModelProto:
    node = helper.make_node("ScatterElements", ["x", "places", "x"], ["y"], axis=1, reduction="add")
    inputs = [value("x", [B, 2]), value("places", [B, 2], TensorProto.INT32)]
    return model([node], inputs, [value("y", [B, 2])], opset=18)


def _unique() -> onnx.ModelProto:
    nodes = [helper.make_node("Unique", ["x"], ["once"], "Unique.once")]
    nodes.append(helper.make_node("ReduceSum", ["once"], ["y"], keepdims=0))
    return model(nodes, [value("x", [B, 2])], [value("y", [])], opset=18)


REFUSED = {
    "where the parser does not tell the node": (
        _scatter(),
        "a node of operator ScatterElements: Unsupported reduction",
    ),
    "where it says nothing else": (_unique(), r"node 0 'Unique\..*' \(Unique\): not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_operator_is_named_and_what_to_do(tmp_path, case):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform or Python")
    graph, said = REFUSED[case]
    with pytest.raises(BundleError, match=rf"{said}.*; expected operators that this library has; .*--backend cpu"):
        _make(graph, tmp_path)
    assert not (tmp_path / "step.engine").exists()
