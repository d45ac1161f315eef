"""The way through each version, walked with stand-ins that have exactly its members."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
import small_graphs
from stand_ins.tensorrt import VERSIONS, fake
from txl_engines.building import CompiledEngines, check_gpus, ring_works
from txl_engines.bundles import choose_update
from txl_engines.worker import BuildRequest, Outcome, check_engine, compile_graph
from txl_runtime.bundle.engines.sidecar import RECIPE, RTX_RECIPE
from txl_runtime.device.engines import library as libraries
from txl_runtime.device.engines.library import Library, load_library
from txl_runtime.errors import BackendError, BundleError, UsageError


def library(name: str) -> tuple[Library, SimpleNamespace]:
    record = SimpleNamespace()
    module = fake(name, record)
    return Library("rtx" if name.startswith("rtx") else "tensorrt", module), record


@pytest.fixture
def walk(tmp_path: Path) -> Callable[..., Outcome]:
    """Do as `CompiledEngines`, but in this process: checks, then the worker's part with a stand-in library."""

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
            scatters=checked.scatters,
        )
        steps: list[None] = []
        out = tmp_path / "small.engine"
        outcome = compile_graph(request, checked.data, lib, lambda: out, lambda: steps.append(None))
        assert len(steps) == 3
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
    assert record.network_flags == 1 << int(lib.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    maker = CompiledEngines(lib, "bf16")
    assert maker.recipe == (RTX_RECIPE if name == "rtx171" else RECIPE)
    half, bf16 = (small_graphs.product(kind, kind) for kind in (small_graphs.HALF, small_graphs.BF16))
    walk(lib, half, "fp16")
    walk(lib, bf16, "bf16")
    assert record.set == (["REQUIRE_USER_ALLOCATION"] * 3 if lib.facts.portable else []), "types are the graph's"


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
