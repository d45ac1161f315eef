"""Engines of steps that return their whole state, from a bundle to a loop, with stand-ins for CUDA and the libraries.

The engine files are real ones of TensorRT-RTX, where that is installed: they are built without a GPU.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from resealing import as_tensorrt
from stand_ins.cuda import run_engines
from stand_ins.driver import FakeDriver
from stand_ins.engine import open_fake_device
from stand_ins.tensorrt import VERSIONS, fake
from step_models import FEATURES, MODELS, VOCABULARY, B
from txl_engines import build_bundle
from txl_runtime import BackendError, load
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.device import onnxruntime_cuda
from txl_runtime.device.backend import DeviceBackend
from txl_runtime.device.engines import files as engine_files
from txl_runtime.device.engines.files import find_engines
from txl_runtime.device.engines.library import Library
from txl_runtime.device.engines.opening import load_engines
from txl_runtime.streaming.state import initial_values

pytestmark = pytest.mark.device

GPU = "Fake RTX, SM 86, 16 multiprocessors"
every = pytest.mark.parametrize("kind", MODELS)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A bundle of a step with its engines for a target."""
    made: dict[tuple[str, str], Path] = {}

    def build(kind: str, target: str) -> Path:
        if (kind, target) not in made:
            if target == "rtx":
                pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform or Python")
            path = MODELS[kind]().write(tmp_path_factory.mktemp("built") / "step.txl")
            build_bundle(path, target, (86,) if target == "rtx" else ())
            made[kind, target] = path
        return made[kind, target]

    return build


def opened(path: Path, name: str, cuda: FakeDriver) -> DeviceBackend:
    """A bundle's engines, by stand-ins."""
    bundle, trt = open_bundle(path), fake(name, SimpleNamespace(data=b""))
    library = Library("rtx" if name.startswith("rtx") else "tensorrt", trt)
    engines = find_engines(bundle, library.target)
    run_engines(trt, bundle, {engine.sidecar.sha256: engine.program for engine in engines}, cuda)
    return load_engines(bundle, library, open_fake_device(cuda))


def loops(path: Path, backend: DeviceBackend) -> tuple[Any, Any]:
    """On the device, and on the CPU."""
    bundle = open_bundle(path)
    return backend.open_loop(bundle.manifest, initial_values(bundle)), load(path, backend="cpu", threads=1).open_loop()


def run_both(kind: str, pair: tuple[Any, Any], turns: int) -> None:
    draws = np.random.default_rng(0)
    for turn in range(turns):
        length = 2 if kind == "growing" else int(draws.choice([1, 4]))
        inputs: dict[str, np.ndarray] = {"tokens": draws.integers(0, VOCABULARY, (B, length)).astype(np.int32)}
        counts = np.full(B, length, np.int32)
        if kind == "recurrent":
            obs = draws.normal(size=(B, length, FEATURES)).astype(np.float32)
            inputs = {"obs": obs, "starts": draws.random(B) < 0.3}
        if kind != "growing":
            counts[turn % B] = 0
        found, expected = (loop.run(inputs, counts, commit=turn % 5 != 2).outputs() for loop in pair)
        for name, array in expected.items():
            assert found[name].tobytes() == array.tobytes(), name
        for loop in pair:
            if turn % 7 == 5:
                loop.clear(np.arange(B) if kind == "growing" else np.array([1]))
            if turn % 4 == 1:
                loop.reorder(np.array([2, 0, 1]))
        for row in range(B):
            ours, theirs = (loop.take(row).tensors for loop in pair)
            assert ours.keys() == theirs.keys()
            assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)


@pytest.mark.slow
@every
@pytest.mark.parametrize("name", ["rtx171", "trt10.0.1", "trt10.16.1.11", "trt114a"])
def test_engines_of_every_version_compute_what_the_cpu_does(built, tmp_path, monkeypatch, kind, name):
    monkeypatch.setattr(engine_files, "gpu_model", lambda: GPU)
    path, cuda = built(kind, "rtx"), FakeDriver()
    if not name.startswith("rtx"):
        path = as_tensorrt(path, tmp_path / "other.txl", VERSIONS[name][1], GPU)
    backend = opened(path, name, cuda)
    pair = loops(path, backend)
    run_both(kind, pair, 40)
    assert cuda.calls["cuGraphLaunch"] > 5
    del pair, backend
    cuda.check(everything=True)


@every
def test_onnx_runtime_runs_steps_by_address(built, kind):
    path = built(kind, "cuda")
    # Addresses are the host's, and work is done at once, as ONNX Runtime waits for its own.
    bundle, device = open_bundle(path), open_fake_device(FakeDriver(eager=True, unified=True))
    sessions = onnxruntime_cuda.OrtSessions(onnxruntime, bundle, [("CPUExecutionProvider", {})], "cpu")
    backend = onnxruntime_cuda.load_onnxruntime(sessions, bundle, device, device.queue(), None, "CPUExecutionProvider")
    assert (backend.update, [program.kind for program in backend.programs]) == (
        "replace",
        ["step"] * len(bundle.manifest.programs),
    )
    run_both(kind, loops(path, backend), 30)


def test_another_rule_than_the_engines_have_is_refused(built):
    path = built("recurrent", "cuda")
    with pytest.raises(BackendError, match=r"has cuda engines of replace memory alone, expected them for"):
        find_engines(open_bundle(path), "cuda", "ring")
