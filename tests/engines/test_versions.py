"""The way through each version, walked with stand-ins that have exactly its members."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
import small_graphs
from onnx import helper
from stand_ins.tensorrt import VERSIONS, fake
from txl_engines.building import CompiledEngines, check_gpus, ring_works
from txl_engines.bundles import choose_update
from txl_engines.worker import BuildRequest, Outcome, check_engine, compile_graph
from txl_runtime.device.engines import library as libraries
from txl_runtime.device.engines.library import Library, load_library
from txl_runtime.device.engines.sidecar import RECIPE, RTX_RECIPE, WEAK_RECIPE
from txl_runtime.errors import BackendError, BundleError, UsageError


def library(name: str) -> tuple[Library, SimpleNamespace]:
    record = SimpleNamespace()
    module = fake(name, record)
    return Library("rtx" if name.startswith("rtx") else "tensorrt", module), record


@pytest.fixture
def walk(tmp_path: Path) -> Callable[..., Outcome]:
    """What `CompiledEngines` does, but in this process: checks, then the worker's part with a stand-in library."""

    def through(lib: Library, graph: onnx.ModelProto, precision: str, gpus=(), update="rolled") -> Outcome:
        described = small_graphs.program(graph, update=update)
        maker = CompiledEngines(lib, precision, gpus)
        checked = maker.read(graph.SerializeToString(), described, tmp_path)
        request = BuildRequest(
            target=lib.target,
            size=len(checked.data),
            file="small.onnx",
            program=described,
            gpus=maker.gpus,
            half=precision == "fp16",
            scatters=checked.scatters,
        )
        steps: list[None] = []
        out = tmp_path / "small.engine"
        outcome = compile_graph(request, checked.data, lib, lambda: out, lambda: steps.append(None))
        assert len(steps) == (3 if lib.facts.progress else 0)
        assert (tmp_path / "small.engine").read_bytes().startswith(b"engine ")
        return outcome

    return through


@pytest.mark.parametrize("name", VERSIONS)
def test_a_graph_goes_all_the_way(name: str, walk):
    lib, record = library(name)
    gpus = (86, 120) if lib.facts.portable else ()
    outcome = walk(lib, small_graphs.product(), "fp32", gpus)
    assert outcome.failure == ""
    assert outcome.layers.fused == {"_gemm_mha_v2": 1}
    assert "loaded" in outcome.verified
    assert "TF32" in record.cleared
    assert record.verbosity == "DETAILED"
    assert record.set == (["REQUIRE_USER_ALLOCATION"] if lib.facts.portable else [])
    assert record.gpus == ({0: "SM86", 1: "SM120"} if lib.facts.portable else {})
    flags = lib.module.NetworkDefinitionCreationFlag
    wanted = flags.STRONGLY_TYPED if lib.facts.strongly_typed else flags.EXPLICIT_BATCH
    assert record.network_flags == 1 << int(wanted)
    opset = next(entry.version for entry in onnx.load_model_from_string(record.data).opset_import)
    assert opset == (17 if name == "trt860" else 18), "8.6 knows opsets up to 17"


@pytest.mark.parametrize("name", VERSIONS)
def test_half_precision_is_a_flag_only_where_types_are_not_the_graph_s(name: str, walk):
    lib, record = library(name)
    graph = small_graphs.product(small_graphs.HALF, small_graphs.HALF)
    walk(lib, graph, "fp16")
    expected = {"trt860": ["FP16", "OBEY_PRECISION_CONSTRAINTS"], "rtx171": ["REQUIRE_USER_ALLOCATION"]}
    assert record.set == expected.get(name, [])
    assert record.kept == record.bound == [], "the graph has no float32"


def mixed() -> onnx.ModelProto:
    """fp16 with what stays float32 between casts, whole numbers, constants of both types, and a norm in fp16."""
    nodes = [
        helper.make_node("MatMul", ["a", "b"], ["product"]),
        helper.make_node("Cast", ["product"], ["wide"], to=small_graphs.FLOAT),
        helper.make_node("Softmax", ["wide"], ["shares"], axis=-1),
        helper.make_node("LogSoftmax", ["shares"], ["logs"], axis=-1),
        helper.make_node("ReduceSum", ["logs", "axes"], ["total"], keepdims=1),
        helper.make_node("Add", ["total", "small"], ["sum"]),
        helper.make_node("TopK", ["logs", "one"], ["best", "where"], axis=-1),
        helper.make_node("Cast", ["where"], ["place"], to=small_graphs.INT32),
        helper.make_node("Cast", ["sum"], ["narrow"], to=small_graphs.HALF),
        helper.make_node("Add", ["product", "narrow"], ["moved"]),
        helper.make_node("LayerNormalization", ["moved", "gain", "shift"], ["normed"], axis=-1),
    ]
    half, whole = small_graphs.HALF, small_graphs.FLOAT
    constants = [
        helper.make_tensor("axes", onnx.TensorProto.INT64, [1], [-1]),
        helper.make_tensor("one", onnx.TensorProto.INT64, [1], [1]),
        helper.make_tensor("small", whole, [1], [1e-12]),
        helper.make_tensor("gain", half, [4], [1.0] * 4),
        helper.make_tensor("shift", half, [4], [0.0] * 4),
    ]
    inputs = [small_graphs.value("a", [2, 4], half), small_graphs.value("b", [4, 4], half)]
    outputs = [small_graphs.value("normed", [2, 4], half), small_graphs.value("best", [2, 1], whole)]
    outputs += [small_graphs.value("place", [2, 1], small_graphs.INT32)]
    return small_graphs.model(nodes, inputs, outputs, constants, opset=17)


@pytest.mark.parametrize("name", VERSIONS)
def test_what_the_graph_has_in_float32_stays_so_where_types_are_weak(name: str, walk):
    """The softmax within a LogSoftmax too, which has no name; never casts, whole numbers, or what is fp16."""
    lib, record = library(name)
    recipes = [CompiledEngines(lib, precision).recipe for precision in ("fp16", "fp32")]
    newest = RTX_RECIPE if name == "rtx171" else RECIPE
    assert recipes == [WEAK_RECIPE if name == "trt860" else newest, newest], "what was built before is built again"
    walk(lib, mixed(), "fp16")
    if name != "trt860":
        assert record.kept == record.bound == []
        assert not hasattr(record, "statistics")
        return
    assert set(record.kept) == {
        "small",
        "shares",
        "(Unnamed Layer* 8) [SoftMax]_output",
        "logs",
        "total",
        "sum",
        "best",
    }
    assert len(record.bound) == len(record.kept)
    assert {"shares", "(Unnamed Layer* 8) [SoftMax]_output", "logs", "total", "sum", "best"} <= set(record.bound)
    assert record.statistics == "FLOAT", "of the norm, which itself is fp16"
    walk(lib, mixed(), "fp32")
    assert record.set == ["FP16", "OBEY_PRECISION_CONSTRAINTS"], "only where the precision is fp16"


@pytest.mark.parametrize("name", VERSIONS)
def test_bf16_is_refused_where_there_is_none(name: str, walk):
    lib, _ = library(name)
    graph = small_graphs.product(small_graphs.BF16, small_graphs.BF16)
    if name == "trt860":
        with pytest.raises(BackendError, match=r"precision is bf16, tensorrt 8\.6\.0 has none; export it again"):
            walk(lib, graph, "bf16")
    else:
        walk(lib, graph, "bf16")


@pytest.mark.parametrize("name", VERSIONS)
def test_the_ring_is_taken_where_it_is_in_place(name: str, walk):
    lib, _ = library(name)
    graph = small_graphs.ring()
    if ring_works(lib.facts):
        built = walk(lib, graph, "fp16", update="ring")
        assert built.in_place == 2
    elif lib.facts.opset < 24:
        with pytest.raises(BundleError, match="opset 24, expected 9 to"):
            walk(lib, graph, "fp16", update="ring")
    else:
        with pytest.raises(BackendError, match="updates 0 of 2 states in place, expected all; use --update rolled"):
            walk(lib, graph, "fp16", update="ring")


def test_the_update_rule_is_chosen_by_what_library_and_bundle_have():
    new, _ = library("trt10.16.1.11")
    old, _ = library("trt10.0.1")
    both = ("rolled", "ring")
    assert choose_update(both, None, ring_works(new.facts), new.title) == "ring"
    assert choose_update(both, "rolled", ring_works(new.facts), new.title) == "rolled"
    assert choose_update(("rolled",), None, ring_works(new.facts), new.title) == "rolled"
    assert choose_update(both, None, ring_works(old.facts), old.title) == "rolled"
    with pytest.raises(BackendError, match=r"--update is ring, which tensorrt 10\.0\.1 cannot do.*--update rolled"):
        choose_update(both, "ring", ring_works(old.facts), old.title)
    with pytest.raises(UsageError, match="--update is ring, but the bundle's programs are rolled"):
        choose_update(("rolled",), "ring", ring_works(new.facts), new.title)
    with pytest.raises(BackendError, match="the bundle's programs are ring, expected an update rule that tensorrt"):
        choose_update(("ring",), None, ring_works(old.facts), old.title)
    with pytest.raises(UsageError, match="--update is 'wheel', expected ring or rolled"):
        choose_update(both, "wheel", ring_works(new.facts), new.title)


def test_gpus_are_for_libraries_that_build_anywhere():
    rtx, _ = library("rtx171")
    full, _ = library("trt11.0.0.114")
    assert check_gpus((120, 86, 86), "bf16", rtx) == (86, 120)
    with pytest.raises(UsageError, match="leave --sm out and build on the target"):
        check_gpus((86,), "fp16", full)
    with pytest.raises(UsageError, match="builds for 75, 80, 86, 89, 120, 121; that is a data-centre GPU"):
        check_gpus((90,), "fp16", rtx)
    with pytest.raises(UsageError, match="that is a Jetson: use --target tensorrt there"):
        check_gpus((86, 87), "fp16", rtx)
    with pytest.raises(UsageError, match="SM 80 or newer; leave it out or export fp16"):
        check_gpus((75, 86), "bf16", rtx)


def test_a_library_without_a_driver_says_so(walk):
    lib, _ = library("trt11.0.0.114")

    def nothing(self, logger):
        raise TypeError("pybind11::init(): factory function returned nullptr")

    lib.module.Builder.__init__ = nothing
    graph = small_graphs.product()
    with pytest.raises(BackendError, match="found no usable CUDA driver, expected an NVIDIA GPU"):
        walk(lib, graph, "fp32")


def test_an_engine_whose_bindings_are_others_is_refused():
    lib, record = library("trt11.0.0.114")
    graph = small_graphs.product()
    record.data = small_graphs.product(inner=(8, 8)).SerializeToString()
    with pytest.raises(BundleError, match=r"one of its inputs is a float32\[2, 8\], expected a float32\[2, 4\]"):
        check_engine(b"engine", small_graphs.program(graph), lib)


def test_a_library_that_is_not_there_is_missed_by_name(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorrt", None)
    libraries.load_library.cache_clear()
    with pytest.raises(BackendError, match=r"not installed.*pip install .*\[tensorrt\].*Jetson.*system-site-packages$"):
        load_library("tensorrt")

    def broken(name):
        raise ImportError("libnvinfer.so.11: cannot open shared object file")

    monkeypatch.setattr(libraries.importlib, "import_module", broken)
    with pytest.raises(BackendError, match=r"tensorrt cannot be loaded: libnvinfer\.so\.11"):
        load_library("tensorrt")
    monkeypatch.undo()
    libraries.load_library.cache_clear()
