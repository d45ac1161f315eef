"""Real engines of small models, built by TensorRT-RTX on a machine without a GPU."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import small_graphs
from onnx import helper
from resealing import contents, copied, reseal
from support import cli
from txl_engines import building
from txl_engines.building import CompiledEngines
from txl_engines.bundles import build_bundle
from txl_engines.checking import read_graph
from txl_engines.compiler import Compiler
from txl_engines.composing import whole_programs
from txl_engines.layers import read_layers
from txl_engines.recording import record_verification
from txl_engines.worker import Outcome
from txl_runtime import load
from txl_runtime.bundle.engines.files import bundle_engines, describe_engine
from txl_runtime.bundle.engines.sidecar import read_sidecar
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.device.engines.library import load_library
from txl_runtime.errors import BundleError, UsageError
from txl_runtime.listener import Silent
from verified_steps import Heard

pytestmark = pytest.mark.device

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform or Python")

WIDE = {"d_model": 64, "d_embed": 64, "n_head": 2, "d_head": 32, "d_inner": 64}
"""As in tests/engines/test_attention_operator.py: exported once."""


def test_every_whole_program_becomes_an_engine_that_the_manifest_lists(bundle: Path):
    heard = Heard()
    before = open_bundle(bundle).manifest
    made = build_bundle(bundle, "rtx", gpus=(86, 89, 120), listener=heard)
    manifest = open_bundle(bundle).manifest
    assert made.update == "ring"
    wanted = [program.name for program in whole_programs(manifest, made.update)]
    assert wanted == ["logprobs-ring-4", "logprobs-ring-1", "last-ring-4", "score-ring-4"]
    assert [engine.program for engine in made.engines] == wanted
    assert before == msgspec.structs.replace(manifest, files=before.files), "nothing but the list of files changed"
    for engine in made.engines:
        assert engine.file == f"engines/rtx/{engine.program}.engine"
        assert not engine.reused
        sidecar = engine.sidecar
        assert manifest.files[engine.file].size == sidecar.bytes == (bundle / engine.file).stat().st_size
        assert manifest.files[engine.file].sha256 == sidecar.sha256
        assert read_sidecar(bundle / engine.file.replace(".engine", ".json")) == sidecar
        assert sidecar.identity.compute_capabilities == (86, 89, 120)
        assert sidecar.identity.flavour == "tensorrt_rtx"
        assert sidecar.kernels is not None
        assert sidecar.kernels > 10
        assert sidecar.attention_layers == manifest.config.n_layer
        assert sidecar.in_place == 2 * manifest.config.n_layer
        assert sidecar.verified_on
    assert heard.stages
    assert all("building" in title for title, _ in heard.stages)
    assert heard.steps > 100, "the builder's own steps"
    assert not [path for path in bundle.iterdir() if path.name.startswith(".")]
    assert dict(bundle_engines(open_bundle(bundle))) == {engine.file: engine.sidecar for engine in made.engines}


def test_a_second_build_is_reused_and_a_forced_one_is_built_of_the_same_anywhere(bundle: Path, plant, monkeypatch):
    """And nothing of the bundle is run, wherever its user stands.

    The compiler's own bytes differ now and then: `txl_engines.worker`.
    """
    first = build_bundle(bundle, "rtx", gpus=(86,))
    moved = bundle.parent / ("a longer name " * 9) / "moved.txl"
    shutil.copytree(bundle, moved)
    after = contents(moved)
    plant(moved)
    monkeypatch.chdir(moved)
    # As Python 3.10 is: it knows no variable that keeps the working folder off its path.
    monkeypatch.setattr(building, "COMMAND", ("-E", *building.COMMAND))
    forced = build_bundle(".", "rtx", gpus=(86,), force=True)
    assert not any(engine.reused for engine in forced.engines)
    assert [engine.sidecar.key for engine in forced.engines] == [engine.sidecar.key for engine in first.engines]
    assert [engine.sidecar.layers for engine in forced.engines] == [engine.sidecar.layers for engine in first.engines]
    assert after.keys() <= contents(moved).keys()
    before = contents(moved)
    monkeypatch.setattr(CompiledEngines, "make", None)  # nothing is built any more
    again = build_bundle(".", "rtx", gpus=(86,))
    assert all(engine.reused for engine in again.engines)
    assert [engine.sidecar for engine in again.engines] == [engine.sidecar for engine in forced.engines]
    assert contents(moved) == before


def test_what_does_not_fit_any_more_is_built_again_with_the_reason(bundle: Path):
    made = build_bundle(bundle, "rtx", gpus=(86,))
    name = made.engines[0].file
    heard = Heard()
    build_bundle(bundle, "rtx", gpus=(89, 120), listener=heard)
    assert f"{name} was built for SM 86, asked for is SM 89, 120; built again" in heard.warnings

    facts = bundle / name.replace(".engine", ".json")
    document = json.loads(facts.read_text())
    document["identity"]["version"] = "1.6.0.1"
    facts.write_text(json.dumps(document))
    reseal(bundle)
    heard = Heard()
    build_bundle(bundle, "rtx", gpus=(89, 120), listener=heard)
    assert any("was built by version 1.6.0.1, the library here is" in warning for warning in heard.warnings)

    facts.write_text("{}")
    (bundle / name).write_bytes(b"other")
    reseal(bundle)
    heard = Heard()
    build_bundle(bundle, "rtx", gpus=(89, 120), listener=heard)
    assert any("expected the facts of an engine" in warning for warning in heard.warnings)
    open_bundle(bundle)


def test_an_engine_that_is_good_but_not_listed_is_taken_up(bundle: Path, monkeypatch):
    made = build_bundle(bundle, "rtx")
    manifest = json.loads((bundle / "manifest.json").read_text())
    unlisted = {name: record for name, record in manifest["files"].items() if not name.startswith("engines/")}
    (bundle / "manifest.json").write_text(json.dumps(manifest | {"files": unlisted, "later": {"field": 1}}))
    open_bundle(bundle)
    monkeypatch.setattr(CompiledEngines, "make", None)
    again = build_bundle(bundle, "rtx")
    assert all(engine.reused for engine in again.engines)
    assert {engine.file for engine in made.engines} <= set(open_bundle(bundle).manifest.files)
    assert json.loads((bundle / "manifest.json").read_text())["later"] == {"field": 1}, "unknown fields are kept"


FUSED = {"_gemm_mha_v2", "_gemv_mha_v1"}
HALF: dict[str, tuple[str, int, str]] = {
    f"{precision}, {update}, B {batch}": (precision, batch, update)
    for precision in ("fp16", "bf16")
    for batch in (1, 2)
    for update in ("ring", "rolled")
}


@pytest.mark.parametrize(
    "half", [name if name == "fp16, ring, B 2" else pytest.param(name, marks=pytest.mark.slow(keep=1)) for name in HALF]
)
def test_attention_fuses_in_half_precision(make_bundle, tmp_path, half: str):
    precision, batch, update = HALF[half]
    wide = make_bundle(config=WIDE, batch_size=batch, precision=precision, verify=False)
    path = copied(wide, tmp_path / "half.txl")
    heard = Heard()
    made = build_bundle(path, "rtx", gpus=(86, 89, 120), update=update, listener=heard)
    layers = open_bundle(path).manifest.config.n_layer
    assert {engine.sidecar.identity.kind for engine in made.engines} == {"logprobs", "last", "score"}
    for engine in made.engines:
        assert engine.sidecar.identity.precision == precision
        assert engine.sidecar.attention_layers == engine.sidecar.fused_attention == layers, engine
        assert set(engine.sidecar.fused_kernels) <= FUSED
        assert engine.sidecar.in_place == (2 * layers if update == "ring" else 0)
        if update == "ring" and engine.sidecar.identity.segment_length == 1 and batch == 2:
            # Attention became one operator on the way. Of two heads in all, at B 1, the library copies it either way.
            assert (engine.sidecar.copying, engine.sidecar.read_in_place) == (0, 2 * layers)
    assert heard.warnings == []


SHAPES: dict[str, dict[str, Any]] = {
    "keys and values": {},
    "hidden memory": {"memory": "hidden"},
    "learned positions": {"config": {"attn_type": 1, "position_rows": 9}},
    "learned positions, hidden memory": {"config": {"attn_type": 1, "position_rows": 9}, "memory": "hidden"},
    "absolute positions": {"config": {"attn_type": 2}},
    "learned absolute positions": {"config": {"attn_type": 3, "position_rows": 12}},
    "odd heads": {"config": {"d_head": 41}},
    "adaptive softmax": {"config": {"cutoffs": (20, 40)}},
    "no memory": {"config": {"memory_length": 0}},
    "window and clamp": {"config": {"same_length": True, "clamp_length": 3}},
    "zeros, pre-norm": {"config": {"memory_start": "zeros", "pre_lnorm": True}},
    "single steps": {"lookup": True},
}


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_kind_of_model_builds(make_bundle, tmp_path, shape: str, precision: str):
    options = {"config": {}, **SHAPES[shape]}
    # Heads as wide as engines are made for, but where the width is what is tried.
    options["config"] = {"d_head": 16, **options["config"]}
    path = copied(make_bundle(verify=False, precision=precision, **options), tmp_path / "small.txl")
    for update in open_bundle(path).manifest.updates:
        heard = Heard()
        made = build_bundle(path, "rtx", gpus=(86, 89, 120), update=update, listener=heard)
        assert {engine.sidecar.identity.kind for engine in made.engines} == {"logprobs", "last", "score"}
        assert {engine.sidecar.attention_layers for engine in made.engines} == {2}
        # A query that meets one key, its own, needs no attention, and gets none.
        many = [engine for engine in made.engines if shape != "no memory" or engine.sidecar.identity.segment_length > 1]
        if precision != "fp32":
            assert {engine.sidecar.fused_attention for engine in many} == {2}
            assert len(heard.warnings) == len(made.engines) - len(many)


def test_attention_that_did_not_fuse_is_told(bundle: Path):
    heard = Heard()
    build_bundle(bundle, "rtx", listener=heard)
    told = [warning for warning in heard.warnings if "attention layers became one kernel" in warning]
    assert told[0].startswith("logprobs-ring-4: 0 of 2 attention layers became one kernel: in fp32")
    assert "--precision fp16 or bf16" in told[0]


@pytest.mark.parametrize("dtype", [small_graphs.HALF, small_graphs.BF16, small_graphs.FLOAT])
def test_the_ring_is_updated_in_place(dtype: int, tmp_path):
    graph = small_graphs.ring(dtype)
    described = small_graphs.program(graph, update="ring")
    precision = {small_graphs.HALF: "fp16", small_graphs.BF16: "bf16", small_graphs.FLOAT: "fp32"}[dtype]
    maker = CompiledEngines(load_library("rtx"), precision)
    checked = maker.read(graph.SerializeToString(), described, tmp_path)
    built = maker.make(checked, described, tmp_path / "ring.engine", Silent())
    assert built.in_place == 2
    assert built.layers.fused_attention == (dtype != small_graphs.FLOAT)


def test_attentions_are_counted_in_the_graph():
    graph = small_graphs.ring()
    checked = read_graph(graph.SerializeToString(), small_graphs.program(graph), Path(), 24)
    assert (checked.attention_layers, checked.scatters) == (1, 2)
    softmax = small_graphs.model(
        [helper.make_node("Softmax", ["a"], ["b"])], [small_graphs.value("a", [2])], [small_graphs.value("b", [2])]
    )
    checked = read_graph(softmax.SerializeToString(), small_graphs.program(softmax), Path(), 24)
    assert checked.attention_layers == 0, "a softmax that weighs nothing"


def test_layers_are_read_from_the_listing():
    listing = """Layers:
Name: __myl_MaxMinGathMul_myl0_0, LayerType: kgen, Inputs: [ { Name: tokens, Dimensions: [1,4] }]
Name: node_matmul_myl0_1, LayerType: gemm, Inputs: []
Name: _gemm_mha_v2_myl0_6, LayerType: kgen, Inputs: []
Name: _gemm_mha_v2_myl0_16, LayerType: kgen, Inputs: []
Name: _gemv_mha_v1_myl0_17, LayerType: kgen, Inputs: []
Name: signal_3, LayerType: signal, Inputs: []

I/O Tensors:
 Name: tokens, IOMode: Input, DataType: Int32
"""
    report = read_layers(listing)
    assert (report.kernels, report.fused_attention) == (5, 3)
    assert report.fused == {"_gemm_mha_v2": 2, "_gemv_mha_v1": 1}
    assert [kind for _, kind in report.rows] == ["kgen", "gemm", "kgen", "kgen", "kgen", "signal"]
    assert report.rows[1] == ("node_matmul_myl0_1", "gemm")
    assert read_layers("nothing of the kind").kernels is None


def test_what_the_compiler_s_loop_does_on_the_host_is_no_kernel():
    """Places, counters and jumps, as a build of nn.GRU with 32 positions lists them."""
    place, state = (
        f"{{ Name: a, Dimensions: [{size}], Datatype: {kind} }}" for size, kind in ((1, "Int64"), (8, "Float"))
    )
    listing = f"""Layers:
Name: init_hvar^10308i64_myl0_26, LayerType: memset, Inputs: [], Constants: [], Outputs: [ {place}], TacticName:
Name: cleared_myl0_27, LayerType: memset, Inputs: [], Constants: [], Outputs: [ {state}], TacticName:
Name: adv_off^hvar^10308i64_myl0_52, LayerType: add, Inputs: [ {place}], Constants: [], Outputs: [ {place}], TacticName:
Name: clp___mye2569_myl0_68, LayerType: cjmp, Inputs: [ {place}], Constants: [], Outputs: [], TacticName:
Name: node_matmul_myl0_70, LayerType: gemm, Inputs: [ {state}], Constants: [], Outputs: [ {state}], TacticName:
"""
    assert read_layers(listing).kernels == 2


REGION = "Name: {ForeignNode[layer.0.norm.../layer.1.norm]}, LayerType: Myelin, Inputs: [], Outputs: []"
PLAIN = "Name: product, LayerType: gemm, Inputs: [], Outputs: []"
MHA = "Name: _gemm_mha_v2_myl0_6, LayerType: kgen, Inputs: [], Outputs: []"


@pytest.mark.parametrize(
    ("rows", "doubt"),
    [
        ((PLAIN, REGION), "the library did not list its kernels, so whether attention fused is not known"),
        ((), "the library did not list its kernels, so whether attention fused is not known"),
        ((PLAIN,), "0 of 1 attention layers became one kernel"),
        ((PLAIN, REGION, MHA), None),
        ((MHA,), None),
    ],
)
def test_a_list_that_hides_kernels_says_nothing_of_attention(rows, doubt):
    """A part of a graph that is compiled as one region, of whose kernels none is listed."""
    report = read_layers("\n".join(("Layers:", *rows)))
    assert len(report.rows) == len(rows)
    doubts = building._doubts(Outcome(layers=report), 1, "fp16")
    assert len(doubts) == (doubt is not None)
    assert all(said.startswith(doubt) for said in doubts)


class Watched:
    """A builder of the real library, whose configurations can be looked at afterwards."""

    def __init__(self, builder: Any) -> None:
        self._builder, self.made = builder, list[Any]()
        self.build_serialized_network = builder.build_serialized_network

    def create_builder_config(self) -> Any:
        self.made.append(self._builder.create_builder_config())
        return self.made[-1]


def test_the_real_library_builds_engines_that_have_to_be_given_their_memory():
    library = load_library("rtx")
    compiler, trt = Compiler(library), library.module
    parsed = compiler.parse(small_graphs.ring(length=1).SerializeToString(), "")
    watched = Watched(parsed.builder)
    plan = compiler.build(dataclasses.replace(parsed, builder=watched), (86,), lambda: None)
    assert plan is not None
    assert watched.made[0].get_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    assert not watched.made[0].get_flag(trt.BuilderFlag.TF32)


def test_the_real_library_says_what_the_runtime_makes_of_it():
    """Some of its functions return whether they went well; the runtime looks at the log after the others."""
    trt = load_library("rtx").module
    context, engine, config = trt.IExecutionContext, trt.ICudaEngine, trt.IRuntimeConfig
    for function, arguments, returned in (
        (context.is_stream_capturable, "stream: ", "-> bool"),
        (context.set_device_memory, "memory: ", "-> None"),
        (context.set_tensor_address, "name: str, memory: ", "-> bool"),
        (config.set_execution_context_allocation_strategy, "strategy: ", "-> None"),
        (engine.create_execution_context, "runtime_config: ", "IExecutionContext"),
        (engine.device_memory_size_v2.fget, "", "-> int"),
    ):
        assert arguments in function.__doc__
        assert returned in function.__doc__
    assert "ensures that inference will support graph capture" in " ".join(trt.BuilderFlag.__doc__.split())


def test_an_engine_is_described_without_any_library(bundle: Path):
    made = build_bundle(bundle, "rtx", gpus=(89,)).engines[0]
    facts = describe_engine(bundle / made.file)
    assert facts["kind"] == "engine"
    assert facts["program"] == made.program
    assert facts["compute_capabilities"] == (89,)
    assert facts["recorded_by"] == "loop"
    assert len(facts["layers"]) >= facts["kernels"] > 0
    shown = " ".join(cli("inspect", bundle / made.file).stdout.split())
    assert "recorded with the copies around it" in shown
    (bundle / made.file).write_bytes(b"altered")
    with pytest.raises(BundleError, match=r"7 bytes that are not the \d+ its sidecar describes; copy it again"):
        describe_engine(bundle / made.file)
    with pytest.raises(BundleError, match="no such file, expected an engine"):
        describe_engine(bundle / "none.engine")
    alone = bundle.parent / "alone.engine"
    alone.write_bytes(b"x")
    with pytest.raises(BundleError, match="missing, expected the facts of the engine beside it"):
        describe_engine(alone)


@pytest.mark.parametrize(
    "harm", ["truncated", *(pytest.param(name, marks=pytest.mark.slow(keep=1)) for name in ("deleted", "all gone"))]
)
def test_a_bundle_whose_engines_are_harmed_still_runs_and_build_makes_them_again(bundle: Path, harm: str):
    made = build_bundle(bundle, "rtx").engines[0]
    file = bundle / made.file
    if harm == "all gone":
        shutil.rmcontents(bundle / "engines")
    elif harm == "deleted":
        file.unlink()
    else:
        os.truncate(file, 1000)
    assert load(bundle, backend="cpu").stream().step([[1]]).shape[2] > 1
    seen = cli("inspect", bundle, "--json")
    broken = json.loads(seen.stdout)["broken_engines"]
    assert broken
    assert all("build it with `txl-deploy build` again" in problem for problem in broken)
    again = build_bundle(bundle, "rtx")
    assert not again.engines[0].reused
    open_bundle(bundle).check(made.file)
    assert json.loads(cli("inspect", bundle, "--json").stdout)["broken_engines"] == []


def test_where_an_engine_was_verified_is_noted_once(bundle: Path):
    made = build_bundle(bundle, "rtx").engines[0]
    for _ in range(2):
        record_verification(bundle, "rtx", [made.program], "selftest on a GeForce RTX 4090")
    noted = dict(bundle_engines(open_bundle(bundle)))[made.file]
    assert noted.verified_on == (*made.sidecar.verified_on, "selftest on a GeForce RTX 4090")


def test_one_build_at_a_time(bundle: Path):
    from txl_engines.publishing import staging

    with staging(bundle), pytest.raises(UsageError, match="another build is at work on it, expected one at a time"):
        build_bundle(bundle, "rtx")
    build_bundle(bundle, "rtx")


def test_the_command(bundle: Path):
    done = cli("build", bundle, "--target", "rtx", "--sm", "8.6,120", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["update"] == "ring"
    for entry in document["programs"]:
        assert {"program", "file", "bytes", "seconds", "kernels", "attention_layers", "fused_attention"} <= set(entry)
        assert entry["bytes"] == (bundle / entry["file"]).stat().st_size
    assert "building logprobs-ring-4 with tensorrt_rtx" in done.stderr
    looked = cli("inspect", bundle / document["programs"][0]["file"], "--json")
    assert json.loads(looked.stdout)["compute_capabilities"] == [86, 120]
    assert json.loads(cli("inspect", bundle, "--json").stdout)["engines"][0]["kernels"] > 10
    wrong = cli("build", bundle, "--target", "rtx", "--sm", "all")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "--sm holds 'all', expected compute capabilities such as 86,89,120" in wrong.stderr


@pytest.mark.slow
def test_engines_are_built_for_every_b_over_one_weight_file(make_bundle, tmp_path):
    two = make_bundle(config={"d_head": 16}, batch_size=(2, 1), precision="fp16", verify=False)
    path = copied(two, tmp_path / "two.txl")
    files = {entry.name for entry in path.iterdir()}
    made = build_bundle(path, "rtx", gpus=(86,), kinds=["logprobs"])
    names = sorted(engine.program for engine in made.engines)
    assert names == ["logprobs-ring-1", "logprobs-ring-1-b1", "logprobs-ring-4", "logprobs-ring-4-b1"]
    for engine in made.engines:
        batch = 1 if engine.program.endswith("-b1") else 2
        assert engine.sidecar.identity.inputs[0].shape == (batch, engine.sidecar.identity.segment_length)
        assert engine.sidecar.identity.weights.keys() == {"weights.safetensors"}
        assert engine.file == f"engines/rtx/{engine.program}.engine"
    assert {entry.name for entry in path.iterdir()} == {*files, "engines"}, "graphs and weights are there once"
    assert all(engine.reused for engine in build_bundle(path, "rtx", gpus=(86,), kinds=["logprobs"]).engines)
