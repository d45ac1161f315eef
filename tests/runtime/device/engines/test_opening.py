"""Engines from a bundle to a stream, with stand-ins for CUDA and for the libraries; and what is refused on the way.

The engine files are real ones of TensorRT-RTX, where that is installed: they are built without a GPU.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from frozen import frozen
from resealing import as_tensorrt, copied, reseal, with_identity
from stand_ins.cuda import FAULTS, open_built, run_engines
from stand_ins.driver import FakeDriver
from stand_ins.engine import open_fake_device, recording_elsewhere
from stand_ins.onnxruntime import load_with
from stand_ins.tensorrt import VERSIONS, fake
from txl_engines import build_bundle, given_weights
from txl_runtime import BackendError, BundleError, load
from txl_runtime.bundle.engines.files import engine_facts, find_engines
from txl_runtime.bundle.engines.sidecar import differences
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.device import onnxruntime_cuda
from txl_runtime.device.backend import DeviceBackend
from txl_runtime.device.cuda import Queue
from txl_runtime.device.engines import fitting
from txl_runtime.device.engines.fitting import check_identity
from txl_runtime.device.engines.library import Library
from txl_runtime.device.engines.opening import load_engines, open_engines
from txl_runtime.device.gpu import platform_name

pytestmark = pytest.mark.device

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform")

B, V = 3, 41
GPU = "Fake RTX, SM 86"
MODEL = f"{GPU}, 16 multiprocessors"
both = pytest.mark.parametrize("update", ["ring", "rolled"])


@pytest.fixture(scope="module", autouse=True)
def small_matrices_count_as_large():
    """For engines to share the weights of small models, and for what stands in for those engines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(given_weights, "LEAST_BYTES", 256)
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A bundle with RTX engines of an update rule; those of a ring share nearly all weights."""
    made: dict[str, Path] = {}

    def build(update: str) -> Path:
        if update not in made:
            place = tmp_path_factory.mktemp("built") / "small.txl"
            path = copied(frozen("0.8/tokens"), place)
            shared = build_bundle(path, "rtx", (86,), update=update).shared_weight_bytes
            assert bool(shared) == (update == "ring")
            made[update] = path
        return made[update]

    return build


@pytest.fixture
def here(monkeypatch):
    """A machine with a GPU, as far as files are concerned."""
    monkeypatch.setattr(fitting, "gpu_name", lambda: GPU)
    monkeypatch.setattr(fitting, "gpu_model", lambda: MODEL)


def loaded(path: Path, change: Callable[[Any], object] = id) -> DeviceBackend:
    """A bundle's engines by a library that takes none of them; `change` is shown it."""
    bundle, trt, cuda = open_bundle(path), fake("rtx171", SimpleNamespace(data=b"")), FakeDriver()
    run_engines(trt, bundle, {}, cuda)
    change(trt)
    return load_engines(bundle, Library("rtx", trt), open_fake_device(cuda))


def flipped(file: Path, place: int) -> None:
    """Turn one bit of a file over."""
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


# --- all the way --------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("name", ["rtx171", "trt10.0.1", "trt10.13.0.35", "trt10.16.1.11", "trt114a"])
def test_engines_of_every_version_stream_as_the_cpu_does(built, here, tmp_path, monkeypatch, name, update):
    path = built(update)
    if not name.startswith("rtx"):
        path = as_tensorrt(path, tmp_path / "other.txl", VERSIONS[name][1], MODEL)
    if update == "ring" and name in ("trt10.0.1", "trt10.13.0.35"):
        backend, _, _ = open_built(path, name)
        stream = load_with(path, backend, monkeypatch).stream()
        with pytest.raises(BackendError, match="overlaps"):  # such an engine cannot have been built there
            stream.step(np.zeros((B, 1), int))
        return
    backend, cuda, seen = open_built(path, name)
    ours = load_with(path, backend, monkeypatch).stream()
    theirs = load(path, backend="cpu", update=update).stream()
    draws = np.random.default_rng(0)
    for turn in range(40):
        tokens = draws.integers(0, V, (B, int(draws.integers(2, 10))))
        lengths = draws.integers(0, tokens.shape[1] + 1, B)
        np.testing.assert_allclose(ours.feed(tokens, lengths), theirs.feed(tokens, lengths), rtol=0, atol=1e-5)
        np.testing.assert_allclose(ours.score(tokens), theirs.score(tokens), rtol=0, atol=1e-5)
        if turn % 7 == 3:
            for stream in (ours, theirs):
                stream.select([1, 0, 2])
                stream.reset([turn % 2])
        found, expected = ours.memory(), theirs.memory()
        for key, rows in expected.items():
            np.testing.assert_allclose(found[key], rows, rtol=0, atol=1e-5)
    assert cuda.calls["cuGraphLaunch"] > 50
    assert seen.contexts == len(ours.loop._calls), "a context for every program and side"


def compared(path: Path, backend: DeviceBackend, monkeypatch: pytest.MonkeyPatch, update: str) -> Any:
    """A stream that has said what the CPU says, step by step, so often that whatever is recorded is recorded."""
    ours, theirs = load_with(path, backend, monkeypatch).stream(), load(path, backend="cpu", update=update).stream()
    for seed in range(8):
        tokens = np.random.default_rng(seed).integers(0, V, (B, 1))
        np.testing.assert_allclose(ours.step(tokens), theirs.step(tokens), rtol=0, atol=1e-5)
    return ours


def calls_of_a_step(stream: Any, cuda: FakeDriver) -> dict[str, int]:
    """Count the calls that a step makes of the driver, but for contexts."""
    before = cuda.calls.copy()
    stream.step(np.ones((B, 1), int))
    return {name: count for name, count in (cuda.calls - before).items() if not name.startswith("cuCtx")}


WAITED = {"cuEventRecord": 1, "cuEventSynchronize": 1}
SINGLY = {"cuMemcpyHtoDAsync_v2": 1, "cuMemcpyDtoHAsync_v2": 1, **WAITED}


@both
def test_a_step_of_rtx_is_one_launch(built, here, monkeypatch, update):
    backend, cuda, _ = open_built(built(update))
    stream = compared(built(update), backend, monkeypatch, update)
    assert calls_of_a_step(stream, cuda) == {"cuGraphLaunch": 1, **WAITED}
    assert set(stream.loop.recorded.values()) == {"recorded"}
    assert "record themselves" not in backend.description


@both
def test_engines_that_were_built_in_an_older_way_run_as_they_did_and_are_named(
    built, here, tmp_path, monkeypatch, update
):
    path = with_identity(copied(built(update), tmp_path / "older.txl"), recipe=2)
    backend, cuda, seen = open_built(path, given_memory=False)
    stream = compared(path, backend, monkeypatch, update)
    assert calls_of_a_step(stream, cuda) == SINGLY, "and the engine's own launch"
    assert set(stream.loop.recorded.values()) == {"by the engine"}
    assert set(seen.graphs) == {"WHOLE_GRAPH_CAPTURE"}
    assert "engines were built in an older way and record themselves: l" in backend.description
    facts = [engine_facts(engine.sidecar)["recorded_by"] for engine in find_engines(open_bundle(path), "rtx")]
    assert set(facts) == {"engine"}
    newer = find_engines(open_bundle(built(update)), "rtx")
    assert {engine_facts(engine.sidecar)["recorded_by"] for engine in newer} == {"loop"}


@both
def test_what_the_library_calls_not_capturable_records_itself_and_is_named(built, here, monkeypatch, caplog, update):
    backend, cuda, seen = open_built(built(update), faults=["not capturable"])
    stream = compared(built(update), backend, monkeypatch, update)
    assert calls_of_a_step(stream, cuda) == SINGLY
    assert cuda.calls["cuStreamBeginCapture_v2"] == 0
    assert set(stream.loop.recorded.values()) == {"by the engine"}
    program = next(iter(stream.loop.recorded)).partition(",")[0]
    said = [record.message for record in caplog.records if "records itself" in record.message]
    library = "tensorrt_rtx 1.7.1.116"
    assert said == [f"{program}: {library} says that it cannot be recorded from outside, so it records itself"]
    assert seen.graphs == ["DISABLED"] + ["WHOLE_GRAPH_CAPTURE"] * (1 if update == "ring" else 2)


def test_all_engines_of_a_model_work_in_one_block_that_is_as_large_as_the_largest_needs(built, here, monkeypatch):
    backend, cuda, seen = open_built(built("ring"))
    needed = max(executable.working_bytes for executable in backend.executables.values())
    model = load_with(built("ring"), backend, monkeypatch)
    (shared,) = {id(each.weights): each.weights for each in backend.executables.values()}.values()
    assert shared.size > 0.6 * model.manifest.weight_bytes, "all but a table of 41 words, which is odd"
    assert cuda.memory.used() == needed + shared.size, "and the weights are there once"
    streams = [model.stream() for _ in range(3)]
    for stream in streams:
        stream.feed(np.ones((B, 9), int))
    assert seen.contexts >= 6
    assert sum(len(block.data) == needed for block in cuda.memory.held) == 1


def test_an_engine_s_memory_that_is_not_there_is_an_error_of_the_model_s_opening(built, here):
    with pytest.raises(BackendError, match=r"cuMemAlloc_v2 returned .* out of memory.*the device's memory is full"):
        open_built(built("ring"), driver=FakeDriver(capacity=100))


def test_closing_a_model_gives_back_the_memory_that_its_engines_work_in(built, here, monkeypatch):
    gc.collect()
    gc.disable()
    try:
        backend, cuda, _ = open_built(built("ring"))
        model = load_with(built("ring"), backend, monkeypatch)
        del backend
        stream = model.stream()
        for _ in range(4):
            stream.step(np.ones((B, 1), int))
        model.close()
        assert cuda.held() == []
    finally:
        gc.enable()


@pytest.mark.parametrize("most", [0, 1, 3])
def test_an_interrupt_while_weights_are_on_their_way_leaves_nothing_behind(built, here, monkeypatch, most):
    cuda, send, sent = FakeDriver(), Queue.send, list[int]()

    def interrupted(queue: Queue, to: int, *others: int) -> None:
        send(queue, to, *others)
        sent.append(to)
        if len(sent) > most:
            raise KeyboardInterrupt

    monkeypatch.setattr(Queue, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_built(built("ring"), driver=cuda)
    gc.collect()
    cuda.check(everything=True)


def test_another_models_engine_that_is_recording_neither_stops_a_model_nor_is_spoilt_by_it(built, here, monkeypatch):
    """RTX records by itself, in a mode that it does not tell; the strictest forbids all threads to make memory."""
    first, cuda, _ = open_built(built("ring"))
    with recording_elsewhere(cuda, first):
        backend, _, _ = open_built(built("ring"), driver=cuda)
        stream = load_with(built("ring"), backend, monkeypatch).stream()
    stream.loop.finish()  # a wait is refused all the same
    with recording_elsewhere(cuda, first):
        pending = stream.loop.run({"tokens": np.ones((B, 1), np.int32)}, np.array([1] * B, np.int32))
    theirs = load(built("ring"), backend="cpu", update="ring").stream()
    np.testing.assert_allclose(pending.rows(), theirs.step(np.ones((B, 1), int)), rtol=0, atol=1e-5)


# --- the cache ----------------------------------------------------------------------------------------------------


def test_what_rtx_compiles_is_kept_beside_the_bundle_and_given_back(built, here, tmp_path, monkeypatch):
    path = copied(built("ring"), tmp_path / "a bundle.txl")
    backend, _, seen = open_built(path)
    stream = load_with(path, backend, monkeypatch).stream()
    for _ in range(3):
        stream.step(np.zeros((B, 1), int))
    assert seen.caches == []
    kept = sorted((tmp_path / "a bundle.txl.rtx-cache").iterdir())
    assert kept
    assert all(file.name.endswith(".cache") and not file.name.startswith(".") for file in kept)
    assert any(file.read_bytes().startswith(b"kernels of logprobs-ring-1") for file in kept)
    _, _, again = open_built(path)
    assert sorted(again.caches) == sorted(file.read_bytes() for file in kept)
    open_bundle(path)  # and the bundle is what it was


def test_a_place_that_cannot_be_written_only_makes_the_next_start_slower(built, here, tmp_path, monkeypatch):
    path = copied(built("ring"), tmp_path / "a.txl")
    (tmp_path / "a.txl.rtx-cache").write_text("a file where the folder would be")
    backend, _, _ = open_built(path)
    stream = load_with(path, backend, monkeypatch).stream()
    for _ in range(3):
        stream.step(np.zeros((B, 1), int))


# --- bindings that raise, return nothing, and refuse ------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["no runtime", "no runtime, TypeError"])
def test_a_library_that_does_not_start_is_an_error_that_auto_goes_around(built, here, wrong):
    with pytest.raises(BackendError, match="cannot start"):
        open_built(built("ring"), faults=[wrong])


@pytest.mark.parametrize(
    "wrong", [fault for fault in FAULTS if fault.startswith(("no context", "address", "memory", "run"))]
)
def test_a_call_that_goes_wrong_is_an_error_and_changes_nothing(built, here, monkeypatch, wrong):
    faults: list[str] = []
    backend, _, _ = open_built(built("ring"), faults=faults)
    ours = load_with(built("ring"), backend, monkeypatch).stream()
    theirs = load(built("ring"), backend="cpu", update="ring").stream()
    draws = np.random.default_rng(0)
    # Once a program has run, only the run can go wrong.
    for columns in (1, 1, 4, 4, 2) if wrong.startswith("run") else (1, 4):
        tokens = draws.integers(0, V, (B, columns))
        faults.append(wrong)
        with pytest.raises(BackendError, match=r"tensorrt_rtx 1\.7\.1\.116 .*(expected|again)"):
            ours.step(tokens)
        faults.clear()
        np.testing.assert_allclose(ours.step(tokens), theirs.step(tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize("wrong", ["cache refused", "cache, RuntimeError"])
def test_kernels_that_are_refused_are_written_anew_however_large_they_were(built, here, tmp_path, monkeypatch, wrong):
    path = copied(built("ring"), tmp_path / "a.txl")
    stream = load_with(path, open_built(path)[0], monkeypatch).stream()
    for _ in range(3):
        stream.step(np.zeros((B, 1), int))
    kept = sorted((tmp_path / "a.txl.rtx-cache").glob("logprobs-ring-1-*"))
    kept[0].write_bytes(b"of another driver" * 1000)
    backend, _, seen = open_built(path, faults=[wrong])
    stream = load_with(path, backend, monkeypatch).stream()
    for _ in range(3):
        stream.step(np.zeros((B, 1), int))
    assert seen.caches == []
    assert kept[0].read_bytes().startswith(b"kernels of logprobs-ring-1")


def test_kernels_are_collected_once_for_each_program(built, here, tmp_path, monkeypatch):
    path = copied(built("ring"), tmp_path / "a.txl")
    backend, _, seen = open_built(path)
    model = load_with(path, backend, monkeypatch)
    for _ in range(4):
        stream = model.stream()
        for _ in range(3):
            stream.step(np.zeros((B, 1), int))
    assert seen.serialized == 1, "one program ran, and later streams compile nothing"


# --- what is refused ----------------------------------------------------------------------------------------------


def refusal(path: Path, version: str = "1.7.1.116", target: Any = "rtx") -> str:
    bundle = open_bundle(path)
    engine = find_engines(bundle, target)[0]
    with pytest.raises(BackendError) as caught:
        check_identity(bundle, engine, version, target)
    assert len(str(caught.value).splitlines()) == 1
    assert "txl-deploy build" in str(caught.value)
    return str(caught.value)


def test_an_engine_of_another_version_is_refused_by_name(built, here):
    assert "built by version 1.7.1.116, the library here is 1.8.0.1" in refusal(built("ring"), "1.8.0.1")


def test_an_engine_for_another_gpu_is_refused_by_name(built, monkeypatch):
    monkeypatch.setattr(fitting, "gpu_name", lambda: "Fake, SM 120")
    assert "was built for SM 86, the GPU here is SM 120" in refusal(built("ring"))


def test_engines_of_rtx_run_under_another_system_and_those_of_tensorrt_do_not(built, here, tmp_path, monkeypatch):
    """NVIDIA says so: built on a Linux server, shipped to PCs with Windows. 0.8.0 wrote a platform to either."""
    rtx, tensorrt = built("ring"), as_tensorrt(built("ring"), tmp_path / "tensorrt.txl", "10.3.0", MODEL)
    monkeypatch.setattr(fitting, "platform_name", lambda: "win32-amd64")
    engine = find_engines(open_bundle(rtx), "rtx")[0]
    assert engine.sidecar.identity.platform == "any"
    of_before = msgspec.structs.replace(engine.sidecar.identity, platform=platform_name())
    for identity in (engine.sidecar.identity, of_before):
        sidecar = msgspec.structs.replace(engine.sidecar, identity=identity)
        check_identity(open_bundle(rtx), engine._replace(sidecar=sidecar), "1.7.1.116", "rtx")
    assert differences(of_before, engine.sidecar.identity) == [], "and `build` keeps it"
    assert f"was built for {platform_name()}, this is win32-amd64" in refusal(tensorrt, "10.3.0", "tensorrt")


def test_an_engine_of_a_gpu_of_another_size_is_refused_though_it_has_the_same_name(built, tmp_path, monkeypatch):
    """All Jetson Orin are "Orin, SM 87"; what 0.8.0 wrote holds no more than that, and is taken."""
    large, small = (f"Orin, SM 87, {count} multiprocessors" for count in (16, 8))
    path = as_tensorrt(built("ring"), tmp_path / "new.txl", "10.3.0", large)
    old = as_tensorrt(built("ring"), tmp_path / "old.txl", "10.3.0", "Orin, SM 87")
    for here in (large, small):
        monkeypatch.setattr(fitting, "gpu_model", lambda here=here: here)
        check_identity(open_bundle(old), find_engines(open_bundle(old), "tensorrt")[0], "10.3.0", "tensorrt")
    assert f"was built on {large}, here is {small}, and it fits one GPU only" in refusal(path, "10.3.0", "tensorrt")
    monkeypatch.setattr(fitting, "gpu_model", lambda: "Orin, SM 8, 16 multiprocessors")
    assert "was built on Orin, SM 87, here is Orin, SM 8, 16" in refusal(old, "10.3.0", "tensorrt")
    monkeypatch.setattr(fitting, "gpu_model", lambda: None)
    assert "was built on Orin, SM 87, here is no known GPU" in refusal(old, "10.3.0", "tensorrt")


def test_an_engine_of_other_weights_is_refused_by_name(built, here, tmp_path):
    path = copied(built("ring"), tmp_path / "a.txl")
    flipped(path / "weights.safetensors", -1)
    assert "was built from other weights" in refusal(reseal(path))


def test_a_bundle_without_engines_says_how_to_build_them():
    path = frozen("ring")
    with pytest.raises(BackendError, match=r"has no rtx engines.*txl-deploy build .* --target rtx"):
        open_engines(open_bundle(path), "rtx")
    with pytest.raises(BackendError, match="backend tensorrt cannot run here: the bundle has no engines for it"):
        load(path, backend="tensorrt")


def test_a_damaged_engine_is_refused_before_a_library_reads_it(built, here, tmp_path):
    path = copied(built("ring"), tmp_path / "a.txl")
    flipped(path / "engines" / "rtx" / "logprobs-ring-1.engine", 200)
    assert load(path, backend="cpu").update == "ring", "the model itself is whole"
    with pytest.raises(BundleError, match=r"SHA-256 is not the manifest's.*build it with `txl-deploy build` again"):
        loaded(path)
    with pytest.raises(BundleError, match="is not the file that its sidecar describes"):
        loaded(reseal(path))


@pytest.mark.parametrize(
    ("bits", "words"), [("UNSUPPORTED_CC", "not built for this GPU"), ("", "no usable CUDA driver")]
)
def test_a_header_that_does_not_fit_says_why(built, here, bits, words):
    def refusing(trt: Any) -> None:
        flags = int(trt.EngineInvalidityDiagnostics[bits]) if bits else 0
        trt.Runtime.get_engine_validity = lambda *_: (trt.EngineValidity.INVALID, flags)

    with pytest.raises(BundleError, match=f"cannot run it.*{words}"):
        loaded(built("ring"), refusing)


def test_an_engine_that_is_not_loaded_says_what_the_library_said(built, here):
    with pytest.raises(BundleError, match=r"cannot load it \(.*Serialization assertion failed.*build it again"):
        loaded(built("ring"))


# --- packages that are not there ----------------------------------------------------------------------------------


def test_missing_packages_are_named(monkeypatch):
    with pytest.raises(
        BackendError, match="was built without CUDA, expected onnxruntime-gpu; pip uninstall onnxruntime"
    ):
        onnxruntime_cuda.import_onnxruntime()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(BackendError, match=r"onnxruntime is not installed, backend cuda needs it; pip install"):
        onnxruntime_cuda.import_onnxruntime()


# --- where it is loaded -------------------------------------------------------------------------------------------


def test_engines_lie_on_the_device_whatever_the_application_works_on(built, here, monkeypatch):
    """And the application works on that afterwards."""
    cuda = FakeDriver(devices=2)
    cuda.cuInit(0)
    cuda.cuCtxPushCurrent_v2(cuda.contexts[1])
    backend, _, _ = open_built(built("ring"), driver=cuda)
    load_with(built("ring"), backend, monkeypatch).stream().step(np.zeros((B, 1), int))
    assert cuda.here("the application") == cuda.contexts[1]
    cuda.unwind()


def test_a_bundle_that_is_the_folder_one_is_in_keeps_its_kernels_beside_it(built, here, tmp_path, monkeypatch):
    path = copied(built("ring"), tmp_path / "a.txl")
    monkeypatch.chdir(path)
    stream = load_with(Path(), open_built(Path())[0], monkeypatch).stream()
    for _ in range(3):
        stream.step(np.zeros((B, 1), int))
    assert list((tmp_path / "a.txl.rtx-cache").iterdir())
    assert not list(path.glob("*.rtx-cache"))
