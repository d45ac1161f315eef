"""Backend cuda: the graphs of `build --target cuda` on stand-ins for ONNX Runtime's CUDA provider and the driver."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from ctypes.util import find_library
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from frozen import frozen
from onnx import helper
from random_operations import Case, Play
from resealing import copied, reseal, with_identity
from stand_ins.driver import FakeDriver
from stand_ins.engine import open_fake_device, recording_elsewhere
from stand_ins.onnxruntime import CPU, Session, StandInOrt, load_with, opened
from step_models import MODELS
from txl_engines.bundles import build_bundle
from txl_engines.recording import record_pass
from txl_runtime import BackendError, BundleError, load
from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.bundle.engines.files import find_engines
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.device import choosing, onnxruntime_cuda
from txl_runtime.guard.graph_check import Walk
from txl_runtime.selftest import run_selftest

B, V = 2, 41
both = pytest.mark.parametrize("update", ["ring", "rolled"])


@both
def test_onnx_runtime_streams_by_address(built, monkeypatch, update):
    path = built(update)
    backend = opened(path)
    assert "run on the CPU" not in backend.description
    assert {program.update for program in backend.programs} == {update}
    ours = load_with(path, backend, monkeypatch).stream()
    theirs = load(path, backend="cpu", update=update).stream()
    draws = np.random.default_rng(0)
    for _ in range(30):
        tokens = draws.integers(0, V, (B, int(draws.integers(2, 10))))
        np.testing.assert_allclose(ours.feed(tokens), theirs.feed(tokens), rtol=0, atol=1e-5)
        np.testing.assert_allclose(ours.score(tokens), theirs.score(tokens), rtol=0, atol=1e-5)
        drawn = [list(stream.generate(tokens, 3, temperature=0)) for stream in (ours, theirs)]
        assert np.array_equal(*drawn)


@pytest.mark.parametrize("kind", MODELS)
def test_steps_run_by_address_too(tmp_path, monkeypatch, kind):
    path = MODELS[kind]().write(tmp_path / "step.txl")
    build_bundle(path, "cuda")
    # Addresses are the host's, and work is done at once, as ONNX Runtime waits for its own.
    bundle, device = open_bundle(path), open_fake_device(FakeDriver(eager=True, unified=True))
    sessions = onnxruntime_cuda.OrtSessions(onnxruntime, bundle, [("CPUExecutionProvider", {})], "cpu")
    backend = onnxruntime_cuda.load_onnxruntime(sessions, bundle, device, device.queue(), None, "CPUExecutionProvider")
    assert backend.update == "replace"
    assert len(backend.programs) == len(bundle.manifest.programs)
    Play(Case(kind, "replace", path, load(path, "cpu", threads=1), 0.0), load_with(path, backend, monkeypatch), 0).go(
        40
    )
    with pytest.raises(BackendError, match=r"has cuda engines of replace memory alone, expected them for"):
        find_engines(bundle, "cuda", "ring")


def test_opening_and_running_leave_the_application_on_its_device(built, monkeypatch):
    driver = FakeDriver(devices=2)
    driver.cuInit(0)
    driver.cuCtxPushCurrent_v2(driver.contexts[1])
    backend = opened(built("ring"), driver=driver)
    stream = load_with(built("ring"), backend, monkeypatch).stream()
    stream.feed(np.zeros((B, 3), int))
    assert driver.here("the application") == driver.contexts[1]
    driver.unwind()


def test_another_models_engine_that_is_recording_neither_stops_a_model_nor_is_spoilt_by_it(built, monkeypatch):
    driver = FakeDriver()
    first = opened(built("ring"), driver=driver)
    with recording_elsewhere(driver, first):
        stream = load_with(built("ring"), opened(built("ring"), driver=driver), monkeypatch).stream()
    stream.loop.finish()  # a wait is refused all the same
    with recording_elsewhere(driver, first):
        pending = stream.loop.run({"tokens": np.ones((B, 1), np.int32)}, np.array([1] * B, np.int32))
    theirs = load(built("ring"), backend="cpu", update="ring").stream()
    np.testing.assert_allclose(pending.rows(), theirs.step(np.ones((B, 1), int)), rtol=0, atol=1e-5)


def test_a_step_is_waited_for_once(built, monkeypatch):
    driver = FakeDriver()
    backend = opened(built("ring"), driver=driver)
    stream = load_with(built("ring"), backend, monkeypatch).stream()
    stream.step(np.zeros((B, 1), int))
    before = driver.calls.copy()
    stream.step(np.zeros((B, 1), int))
    waits = {name: count for name, count in (driver.calls - before).items() if name.endswith("Synchronize")}
    assert waits == {"cuEventSynchronize": 1}


def test_graphs_that_pass_the_self_test_say_where(built, tmp_path, monkeypatch):
    path = copied(built("ring"), tmp_path / "a.txl")
    model = load_with(path, opened(path), monkeypatch)
    run_selftest(model).require()
    assert set(record_pass(model)) == {program.name for program in model.backend.programs}
    for engine in find_engines(open_bundle(path), "cuda"):
        assert engine.sidecar.verified_on == ("graph", "self-test on Fake RTX, SM 86")
    assert record_pass(load(path, backend="cpu")) == ()


def test_the_rule_is_the_best_that_was_built_and_that_this_onnx_runtime_has(built, monkeypatch):
    assert opened(built("ring", "rolled")).update == "ring"
    assert opened(built("ring", "rolled"), "rolled").update == "rolled"
    assert opened(built("rolled")).update == "rolled"
    with pytest.raises(BackendError, match=r"has cuda engines of rolled memory alone.*--target cuda --update ring"):
        opened(built("rolled"), "ring")
    monkeypatch.setattr(onnxruntime, "__version__", "1.24.2")  # the last without TensorScatter
    assert opened(built("ring", "rolled")).update == "rolled"
    with pytest.raises(BackendError, match=r"has cuda engines of ring memory alone.*--target cuda --update rolled"):
        opened(built("ring"))


def test_a_bundle_without_graphs_says_how_to_build_them():
    path = frozen("ring")
    with pytest.raises(BackendError, match=r"has no cuda engines.*txl-deploy build .* --target cuda"):
        opened(path)
    with pytest.raises(BackendError, match=r"has no cuda engines.*txl-deploy build .* --target cuda"):
        onnxruntime_cuda.open_onnxruntime_cuda(open_bundle(path))
    with pytest.raises(BackendError, match=r"cannot run here: the bundle has no engines.* --target cuda"):
        load(path, backend="cuda")


def vouch(path: Path, graph: Path) -> None:
    """Have a graph's sidecar vouch for it as it is; and the manifest for both."""
    facts = graph.with_suffix(".json")
    document = json.loads(facts.read_bytes()) | {"sha256": file_sha256(graph), "bytes": graph.stat().st_size}
    facts.write_text(json.dumps(document))
    reseal(path)


def test_a_graph_that_is_not_what_was_built_is_refused(built, tmp_path):
    path = copied(built("ring"), tmp_path / "a.txl")
    graph = path / "engines/cuda/logprobs-ring-1.onnx"
    whole = graph.read_bytes()
    graph.write_bytes(bytes([*whole[:-1], whole[-1] ^ 1]))
    with pytest.raises(BundleError, match=r"SHA-256 is not the manifest's.*build it with `txl-deploy build` again"):
        opened(path)
    reseal(path)
    with pytest.raises(BundleError, match=r"is not the file that its sidecar describes; txl-deploy build .* --force"):
        opened(path)
    shutil.copy(path / "engines/cuda/logprobs-ring-4.onnx", graph)
    vouch(path, graph)
    with pytest.raises(
        BundleError,
        match=r"logprobs-ring-1: one of its inputs is tokens int32\[2, 4\], expected tokens int32\[2, 1\].*build it",
    ):
        opened(path)
    graph.write_bytes(b"\xff" * 40)
    vouch(path, graph)
    with pytest.raises(BundleError, match=r"logprobs-ring-1: has .*, expected .*; build it again"):
        opened(path)


def test_graphs_that_were_composed_in_another_way_are_refused(built, tmp_path):
    path = with_identity(copied(built("ring"), tmp_path / "a.txl"), version="recipe 0")
    with pytest.raises(
        BackendError, match=r"was composed by recipe 0, this version of txl-deploy takes recipe 2; txl-deploy build"
    ):
        opened(path)


def written_before(built: Callable[..., Path], folder: Path) -> Path:
    """A bundle whose graphs are as they were built before: ids are clipped."""
    path = copied(built("ring"), folder / "old.txl")
    bundle = open_bundle(path)
    for engine in find_engines(bundle, "cuda"):
        graph = onnx.load(path / engine.name, load_external_data=False)
        nodes = graph.graph.node
        number = next(n for n, node in enumerate(nodes) if node.op_type == "Max" and node.input[0] == "tokens")
        least, most = nodes[number], nodes[number + 1]
        assert (most.op_type, most.input[0]) == ("Min", least.output[0])
        least.CopyFrom(helper.make_node("Clip", [*least.input, most.input[1]], most.output, "the.clip"))
        del nodes[number + 1]
        (path / engine.name).write_bytes(graph.SerializeToString())
        vouch(path, path / engine.name)
    return path


def test_what_is_read_on_the_cpu_is_refused_by_name(built, tmp_path, monkeypatch):
    """C1: ONNX Runtime has no CUDA kernel of Clip for int32, and copies what the CPU reads once."""
    path = written_before(built, tmp_path)
    wanted = (
        r"-ring-\d: ONNX Runtime 1\.31\.1 reads tokens outside of cuda, where its nodes the\.clip \(Clip\) run, "
        r"expected all on the device; build it again with `txl-deploy build --target cuda`, or use another"
    )
    with pytest.raises(BackendError, match=wanted):
        opened(path)
    monkeypatch.setattr(onnxruntime_cuda.OrtSessions, "_check_places", lambda *_: None)
    assert "nodes run on the CPU: the.clip (Clip)" in opened(path).description


def test_inputs_that_nobody_reads_may_be_anywhere(built):
    """`valid` is read by nobody in a ring's log-probabilities."""
    path = built("ring")
    for engine in find_engines(open_bundle(path), "cuda"):
        read = Walk((path / engine.name).read_bytes(), "step", "weights.safetensors", 2**40).read
        assert ("valid" in read) == (engine.program.kind in ("last", "next"))
        assert {"tokens", "head", "fill"} <= read


def test_outputs_made_elsewhere_are_refused(built):
    def make_on_the_cpu(ort: StandInOrt) -> None:
        real = ort.InferenceSession

        def session(*arguments: Any, **options: Any) -> Any:
            made = real(*arguments, **options)
            made.places["logprobs"] = "Cpu"
            return made

        ort.InferenceSession = session

    with pytest.raises(BackendError, match=r"writes logprobs outside of cuda, expected all on the device"):
        opened(built("ring"), change=make_on_the_cpu)


def test_an_onnx_runtime_that_cannot_tell_places_is_refused(built, monkeypatch):
    monkeypatch.delattr(Session, "get_input_memory_infos")
    with pytest.raises(
        BackendError, match=r"does not tell where a program reads its inputs, expected 1\.23\.2 or newer"
    ):
        opened(built("rolled"))


def test_libraries_of_cuda_are_loaded_first_and_nothing_is_printed(built, capsys):
    """C3: onnxruntime finds no CUDA that pip installed, unless it is told to load it; the stand-in insists."""
    made: list[StandInOrt] = []
    opened(built("ring"), change=made.append)
    assert made[0].preloaded[0] is None, "those beside onnxruntime come first, which pip installed with it"
    assert capsys.readouterr() == ("", "")


def test_a_library_that_is_missing_is_told_when_the_provider_does_not_start(built):
    class Started:
        def get_providers(self) -> list[str]:
            return [CPU]

    def on_the_cpu(ort: StandInOrt) -> None:
        ort.InferenceSession = lambda *_, **__: Started()

    wanted = (
        r"could not start CUDAExecutionProvider and took the CPU instead; expected a driver that runs CUDA 13, and its "
        r"libraries \(Failed to load libnvrtc\.so\.13: .*; looked beside onnxruntime, .* and in: .*\); "
        r"pip install 'onnxruntime-gpu\[cuda,cudnn\]'"
    )
    with pytest.raises(BackendError, match=wanted):
        opened(built("ring"), change=on_the_cpu)


PROVIDER = {
    "CUDA failure 35: driver version is insufficient": (BackendError, "could not start CUDAExecutionProvider: CUDA f"),
    "cuDNN is unavailable": (
        BackendError,
        r"expected cuDNN 9, which this model's steps need; .* pip install nvidia-cudnn-cu13$",
    ),
    "Unsupported model IR version: 99": (BundleError, "expected a graph ONNX Runtime can load; build it"),
    "Could not find an implementation for TensorScatter(24)": (
        BundleError,
        r"expected ONNX Runtime 1\.25 or newer for opset 24, and this is 1\.24\.4",
    ),
}


@pytest.mark.parametrize("said", PROVIDER)
def test_errors_of_the_provider_are_told_from_those_of_a_graph(built, said):
    def fail(ort: StandInOrt) -> None:
        def session(*_: Any, **options: Any) -> Any:
            assert not options["enable_fallback"], "it prints, and tries again on the CPU"
            raise RuntimeError(said)

        ort.InferenceSession = session
        ort.__version__ = "1.24.4" if "TensorScatter" in said else ort.__version__

    error, wanted = PROVIDER[said]
    with pytest.raises(error, match=wanted):
        opened(built("ring"), change=fail)


def test_a_fusion_that_has_no_kernel_is_left_out(built):
    """ONNX Runtime 1.23 makes SkipLayerNormalization of bf16, and then refuses its own graph."""
    tried = []

    def fail(ort: StandInOrt) -> None:
        real = ort.InferenceSession

        def session(*arguments: Any, **options: Any) -> Any:
            tried.append(options.get("disabled_optimizers"))
            if tried[-1] is None:
                raise RuntimeError("Type 'tensor(bfloat16)' of operator (SkipLayerNormalization) is invalid")
            return real(*arguments, **options)

        ort.InferenceSession = session

    opened(built("rolled"), change=fail)
    assert tried == [None, ["SkipLayerNormFusion"]] * 4


@pytest.mark.parametrize(
    ("version", "expected"),
    [("1.31.1", "one of SM 89, 90, 120, 121, which this wheel has code for"), ("9.9", "one that it was built for")],
)
def test_a_wheel_without_kernels_for_this_gpu_is_refused_by_name_when_it_is_opened(
    built, monkeypatch, version, expected
):
    """A Jetson Orin with pip's wheel for aarch64. Who built that version for an Orin is not refused."""
    monkeypatch.setattr(onnxruntime_cuda, "gpu_name", lambda: "Orin, SM 87")
    monkeypatch.setattr(onnxruntime_cuda, "platform_name", lambda: "linux-aarch64")
    monkeypatch.setattr(choosing, "missing", lambda *_, **__: "")
    backend = opened(built("ring"), change=lambda ort: setattr(ort, "__version__", version))
    monkeypatch.setattr(onnxruntime_cuda, "open_onnxruntime_cuda", lambda *_: backend)
    assert load(built("ring"), backend="cuda").backend is backend

    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error cudaErrorNoKernelImageForDevice:no kernel image is available for execution")

    monkeypatch.setattr(Session, "run_with_iobinding", fail)
    wanted = f"onnxruntime {version} has no kernels for Orin, SM 87, expected {expected}; use --backend tensorrt"
    with pytest.raises(BackendError, match=wanted):
        load(built("ring"), backend="cuda")


def test_preloading_that_fails_is_no_error(monkeypatch):
    def fail(**_: object) -> None:
        raise RuntimeError("The directory does not exist!")

    assert "does not exist" in onnxruntime_cuda.preload_libraries(SimpleNamespace(preload_dlls=fail))


def test_the_place_that_has_what_was_missing_is_the_last_that_is_looked_into(monkeypatch, tmp_path):
    """Else a second copy of what is loaded would be, from the next place."""
    folders = [tmp_path / place / "nvidia" / package / "lib" for place in "ab" for package in ("cu13", "cudnn")]
    for folder in folders:
        folder.mkdir(parents=True)
    asked: list[str | None] = []

    def preload(directory: str | None) -> None:
        asked.append(directory)
        if str(folders[0]) not in asked:
            print("Failed to load libcublas.so.13: it is nowhere")

    monkeypatch.setattr(sys, "path", [str(tmp_path / place) for place in ("", "a", "b")])
    monkeypatch.setattr(onnxruntime_cuda, "LIBRARIES", ("lib",))
    assert onnxruntime_cuda.preload_libraries(SimpleNamespace(preload_dlls=preload)) == ""
    assert asked == [None, *map(str, folders[:2])]


def test_no_library_is_taken_from_the_working_folder(tmp_path, monkeypatch):
    """Python puts it into sys.path by its whole name where PYTHONPATH has an empty entry."""
    for name in ("site", "strangers"):
        (tmp_path / name / "nvidia" / "cublas" / onnxruntime_cuda.LIBRARIES[0]).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "strangers")
    monkeypatch.setattr(sys, "path", ["", ".", str(tmp_path / "strangers"), str(tmp_path / "site")])
    assert [Path(folder).parents[2].name for (folder,) in onnxruntime_cuda.pip_folders()] == ["site"]


SPLIT = """
import sys
sys.path += {places!r}
import onnxruntime
from txl_runtime.device.onnxruntime_cuda import preload_libraries
onnxruntime.cuda_version = {version!r}
print(preload_libraries(onnxruntime))
print(*sorted({{line.split()[-1] for line in open("/proc/self/maps") if "cudnn" in line or "cublasLt" in line}}))
"""
LAYOUTS = {
    "12.8": {
        "cublas": ("libcublasLt.so.12", "libcublas.so.12"),
        "cuda_nvrtc": ("libnvrtc.so.12",),
        "cuda_runtime": ("libcudart.so.12",),
        "cudnn": ("libcudnn.so.9",),
        "cufft": ("libcufft.so.11",),
        "curand": ("libcurand.so.10",),
    },
    "13.0": {
        "cu13": ("libcublasLt.so.13", "libcublas.so.13", "libcudart.so.13", "libcurand.so.10", "libnvrtc.so.13"),
        "cudnn": ("libcudnn.so.9",),
    },
}


@pytest.mark.skipif(sys.platform != "linux", reason="the libraries of a test are compiled as Linux has them")
@pytest.mark.parametrize("version", LAYOUTS)
def test_libraries_of_cuda_are_found_in_whichever_folder_pip_put_them(tmp_path, version):
    """ONNX Runtime's own function, with libraries of a test that lie apart from it, as pip lays them out."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or onnxruntime_cuda.pip_folders() or find_library("cublas"):
        pytest.skip("no C compiler here, or CUDA's libraries are")

    def preloaded(*places: Path) -> str:
        code = SPLIT.format(places=["", *map(str, places)], version=version)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
        said, loaded = done.stdout.splitlines()
        found[:] = [Path(file).relative_to(tmp_path).parts[0] for file in loaded.split()]
        return said

    found: list[str] = []
    for package, names in LAYOUTS[version].items():
        folder = tmp_path / "site" / "nvidia" / package / "lib"
        folder.mkdir(parents=True)
        for name in names:
            command = [compiler, "-shared", "-nostdlib", "-x", "c", "/dev/null", f"-Wl,-soname,{name}", "-o", name]
            subprocess.run(command, check=True, cwd=folder)
    shutil.copytree(tmp_path / "site" / "nvidia", tmp_path / "nvidia")  # where the process stands: nobody looks there
    assert preloaded(tmp_path / "site") == ""
    assert found == ["site", "site"]
    shutil.copytree(tmp_path / "site" / "nvidia", tmp_path / "image" / "nvidia")
    shutil.rmtree(tmp_path / "site" / "nvidia" / "cudnn")
    assert preloaded(tmp_path / "site", tmp_path / "image") == ""
    assert found == ["image", "site"], "cuDNN from where it is, and nothing twice"
    missing = preloaded(tmp_path / "elsewhere")
    assert re.search(
        rf"Failed to load libcublasLt\.so\.{version[:2]}: .*no nvidia/\*/lib is in any .*sys\.path", missing
    )
    broken = tmp_path / "site" / "nvidia" / next(iter(LAYOUTS[version])) / "lib" / f"libcublas.so.{version[:2]}"
    broken.write_bytes(b"cut short")
    assert re.search(rf"Failed to load {broken}: .*in: .*{broken.parent}", preloaded(tmp_path / "site"))
