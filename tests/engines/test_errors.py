"""Graphs that TensorRT's parser and builder refuse, or silently take though they should not: named, exit code 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
import small_graphs
from frozen import frozen
from onnx import TensorProto, helper, numpy_helper
from resealing import contents, copied, reseal
from small_graphs import BF16, FLOAT, HALF, product, value
from txl_engines import building
from txl_engines.building import CompiledEngines
from txl_engines.bundles import build_bundle
from txl_engines.messages import explain_build
from txl_engines.worker import check_engine
from txl_runtime.bundle.engines.sidecar import TARGETS
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.bundle.tables import Program
from txl_runtime.device.choosing import missing
from txl_runtime.device.engines.library import load_library
from txl_runtime.errors import BackendError, BundleError, TxlError, UsageError
from txl_runtime.listener import Silent

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform or Python")


def _unknown_operator() -> onnx.ModelProto:
    node = helper.make_node("NoSuchOperator", ["a"], ["b"], name="strange")
    return small_graphs.model([node], [value("a", [2, 2])], [value("b", [2, 2])])


def _custom_domain() -> onnx.ModelProto:
    graph = _unknown_operator()
    graph.graph.node[0].domain = "com.microsoft"
    graph.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return graph


def _opset(version: int) -> onnx.ModelProto:
    graph = product()
    graph.opset_import[0].version = version
    return graph


def _unary(operator: str, shape: list[int | str], dtype: int = FLOAT) -> onnx.ModelProto:
    node = helper.make_node(operator, ["a"], ["b"])
    return small_graphs.model([node], [value("a", shape, dtype)], [value("b", shape, dtype)])


def _mixed_norm() -> onnx.ModelProto:
    node = helper.make_node("LayerNormalization", ["a", "scale"], ["b"], name="the_norm")
    scale = numpy_helper.from_array(np.ones(4, np.float32), "scale")
    return small_graphs.model([node], [value("a", [2, 4], HALF)], [value("b", [2, 4], HALF)], [scale])


def _no_output() -> onnx.ModelProto:
    graph = product()
    del graph.graph.output[:]
    return graph


def _attention(dtype: int, size: int) -> onnx.ModelProto:
    shape = [1, 2, 4, size]
    node = helper.make_node("Attention", ["q", "k", "v"], ["out"], name="whole_attention")
    inputs = [value(name, shape, dtype) for name in ("q", "k", "v")]
    return small_graphs.model([node], inputs, [value("out", shape, dtype)], opset=23)


def _external(location: str = "gone.bin", length: str = "64") -> onnx.ModelProto:
    graph = product()
    del graph.graph.input[1]
    weight = TensorProto(name="b", data_type=FLOAT, dims=[4, 2], data_location=TensorProto.EXTERNAL)
    for key, text in (("location", location), ("offset", "0"), ("length", length)):
        weight.external_data.add(key=key, value=text)
    graph.graph.initializer.append(weight)
    return graph


ROWS = {
    "unknown operator": (_unknown_operator(), r"node 0 'strange' \(NoSuchOperator\): .*expected operators that"),
    "custom domain": (_custom_domain(), r"uses the operators of \['com.microsoft'\], expected ONNX's own"),
    "mixed types": (
        product(FLOAT, HALF),
        r"node 0 'the_product' \(MatMul\): .*`A` is of type Float and `B` is of type Half.*expected one type",
    ),
    "shapes that do not meet": (
        product(inner=(3, 5)),
        r"node 0 'the_product' \(MatMul\): .*must match; expected shapes that fit",
    ),
    "opset too new": (_opset(26), r"opset 26, expected 9 to 24.*use a newer library"),
    "opset far too new": (_opset(99), r"opset 99, expected 9 to 24"),
    "opset too old": (_opset(7), r"opset 7, expected 9 to 24"),
    "double": (
        product(TensorProto.DOUBLE, TensorProto.DOUBLE),
        r"one of its inputs is a float64\[2, 4\], expected a float32\[2, 4\] as in the manifest",
    ),
    "string": (
        _unary("Identity", [2], TensorProto.STRING),
        r"one of its inputs is a string\[2\], expected a float32\[2\]",
    ),
    "dynamic": (_unary("Relu", ["n", 2]), r"one of its inputs is a float32\[n, 2\], expected a float32\[1, 2\]"),
    "mixed layer norm": (_mixed_norm(), r"'the_norm' \(LayerNormalization\): .*identical types.*cast one of the two"),
    "no output": (_no_output(), r"a graph without outputs"),
    "missing weights": (_external(), r"gone\.bin: missing, expected the weights of small\.onnx; copy the bundle again"),
    "weights elsewhere": (_external("../gone.bin"), r"b lies in '\.\./gone\.bin', expected a file beside the graph"),
    "short weights": (_external("short.bin"), r"short\.bin: 8 bytes, expected at least 64, which small\.onnx reads"),
    "odd weights": (_external("short.bin", "many"), r"'many' as a place in a weight file, expected a whole number"),
}


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., None]:
    """Build a graph, or try to; whatever happens, nothing is left when it fails."""

    def attempt(data: bytes, described: Program, precision: str = "fp32", gpus: tuple[int, ...] = ()) -> None:
        before = sorted(tmp_path.iterdir())
        try:
            maker = CompiledEngines(load_library("rtx"), precision, gpus)
            graph = maker.read(data, described, tmp_path)
            maker.make(graph, described, tmp_path / "small.engine", Silent())
        finally:
            assert sorted(tmp_path.iterdir()) == before, "nothing is left"

    return attempt


@pytest.mark.parametrize("row", ROWS)
def test_a_bad_graph_is_named(row: str, tmp_path, build):
    graph, message = ROWS[row]
    (tmp_path / "short.bin").write_bytes(b"too few.")
    precision = "fp16" if row in ("mixed types", "mixed layer norm") else "fp32"
    with pytest.raises(TxlError, match=message) as caught:
        build(graph.SerializeToString(), small_graphs.program(graph), precision)
    assert caught.value.exit_code == 2
    assert "/_src/" not in str(caught.value), "no places in other people's sources"


@pytest.mark.parametrize(("dtype", "width"), [(FLOAT, 64), (HALF, 512)])
def test_attention_that_has_no_kernel_becomes_several(dtype: int, width: int, tmp_path):
    graph = _attention(dtype, width)
    described = small_graphs.program(graph)
    maker = CompiledEngines(load_library("rtx"), "fp16" if dtype == HALF else "fp32")
    checked = maker.read(graph.SerializeToString(), described, tmp_path)
    made = maker.make(checked, described, tmp_path / "small.engine", Silent())
    assert (made.failure, made.layers.fused_attention, checked.attention_layers) == ("", 0, 1)
    said = "Attention operation was not supported by a dedicated kernel."  # by a TensorRT that is not asked for this
    assert "expected attention as products and a softmax" in explain_build(said, checked, "tensorrt 10.16")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"small\.onnx: 0 bytes, expected an ONNX graph; export the model again"),
        (b"\xff" * 100, r"small\.onnx: 100 bytes that are no ONNX graph"),
        (b"not a graph at all", r"no ONNX graph|without outputs"),
    ],
    ids=["empty", "garbage", "text"],
)
def test_bytes_that_are_no_graph(data: bytes, message: str, build):
    with pytest.raises(BundleError, match=message):
        build(data, small_graphs.program(product()))


def test_a_program_that_promises_more(build):
    graph = product()
    described = small_graphs.program(graph)
    more = msgspec.structs.replace(described, outputs=described.outputs * 2)
    with pytest.raises(BundleError, match="has 1 outputs, expected the 2 of the manifest"):
        build(graph.SerializeToString(), more)


def test_bf16_for_a_gpu_without_it_is_refused_before_the_build(build):
    graph = product(BF16, BF16)
    with pytest.raises(UsageError, match="--sm holds 75, which has no bf16"):
        build(graph.SerializeToString(), small_graphs.program(graph), "bf16", (75,))
    with pytest.raises(BackendError, match=r"HW-specific datatype.*SM 75 has no bf16; leave it out of --sm"):
        # As it would be told by the builder itself, of a graph that holds bf16 unannounced.
        build(graph.SerializeToString(), small_graphs.program(graph), "fp32", (75,))


STRIPPED = """
from txl_engines import compiler
from txl_engines import worker

def build(self, parsed, gpus, on_step):
    config = parsed.builder.create_builder_config()
    config.set_flag(self.library.module.BuilderFlag.REFIT)
    config.set_flag(self.library.module.BuilderFlag.STRIP_PLAN)
    plan = parsed.builder.build_serialized_network(parsed.network, config)
    self.library.journal.errors.clear()  # as if stderr alone had been told
    return plan

compiler.Compiler.build = build
worker.main()
"""


def test_what_only_stderr_was_told_is_explained(build, monkeypatch, capfd):
    """Engines with refittable weights need a driver; the compiler's complaint passes the logger by."""
    weight = numpy_helper.from_array(np.ones((4, 2), np.float32), "b")
    graph = product()
    del graph.graph.input[1]
    graph.graph.initializer.append(weight)
    monkeypatch.setattr(building, "COMMAND", ("-c", STRIPPED))
    with pytest.raises(BackendError, match=r"expected a CUDA driver: engines whose weights are stripped"):
        build(graph.SerializeToString(), small_graphs.program(graph))
    assert capfd.readouterr().err == "", "told once, in our words"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "the build process was ended by SIGSEGV"),
        ("raise SystemExit(3)", "the build process ended with code 3"),
        ("raise RuntimeError('a fault of ours')", "a fault of ours|ended with code 1"),
    ],
    ids=["crash", "exit", "fault"],
)
def test_a_build_process_that_dies_is_told(build, monkeypatch, script: str, message: str):
    monkeypatch.setattr(building, "COMMAND", ("-c", f"import sys; sys.stdin.buffer.readline(); {script}"))
    graph = product()
    with pytest.raises(BackendError, match=message):
        build(graph.SerializeToString(), small_graphs.program(graph))


@pytest.mark.parametrize("data", [b"", b"x" * 4, b"x" * 4096], ids=["empty", "short", "garbage"])
def test_bytes_that_are_no_engine(data: bytes):
    described = small_graphs.program(product(), name="a-program")
    with pytest.raises(BundleError, match=r"a-program: .*MALFORMED_ENGINE.*expected an engine; build it again"):
        check_engine(data, described, load_library("rtx"))


@pytest.mark.parametrize(("target", "precision"), [*((target, "int8") for target in TARGETS), ("rtx", "int4")])
def test_precisions_of_the_cpu_are_refused_by_name(target: str, precision: str, tmp_path):
    path = copied(frozen(f"0.8/{precision}"), tmp_path / "b.txl")
    wanted = f"precision is {precision}, which is for the CPU, expected fp32, fp16 or bf16"
    with pytest.raises(UsageError, match=f"{wanted}; export it"):
        build_bundle(path, target)
    assert missing(target, open_bundle(path)) == f"the bundle's {wanted}"


def test_an_altered_bundle_is_refused_and_left_alone(bundle):
    good = (bundle / "logprobs-1.onnx").read_bytes()
    (bundle / "logprobs-1.onnx").write_bytes(b"garbage")
    with pytest.raises(BundleError, match="7 bytes, expected"):
        build_bundle(bundle, "rtx")
    (bundle / "logprobs-1.onnx").write_bytes(good)
    with pytest.raises(UsageError, match="--target is 'npu', expected rtx, tensorrt or cuda"):
        build_bundle(bundle, "npu")
    # With a manifest that vouches for the garbage, so that the build itself meets it after a good engine.
    file = open_bundle(bundle).manifest.programs[-1].file
    (bundle / file).write_bytes(b"\xff" * 50)
    before = contents(reseal(bundle))
    with pytest.raises(BundleError, match=f"{file}: has a number of more than 64 bits"):
        build_bundle(bundle, "rtx", update="rolled")
    assert contents(bundle) == before
    open_bundle(bundle)
