"""The GPU check: where there is none it says so and ends well; its competitors compute what the bundle does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from txl_runtime import load
from txl_runtime.device.gpu import gpu_name

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.skipif(gpu_name() is not None, reason="there is a GPU here")
def test_without_a_gpu_nothing_is_run_and_nothing_is_wrong(tmp_path):
    command = [sys.executable, FOLDER / "gpu_check.py", "--quick", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert "0 run" in done.stdout
    assert "no usable CUDA driver" in (tmp_path / "gpu_check.md").read_text()
    results = json.loads((tmp_path / "gpu_check.json").read_text())["results"]
    assert (results["run"], results["gpu"], results["engines"]) == (0, None, [])


@pytest.mark.gpu
def test_with_a_gpu_everything_there_is_runs(tmp_path):
    if gpu_name() is None:
        pytest.skip("no usable CUDA driver was found, expected an NVIDIA GPU and its driver")
    command = [sys.executable, FOLDER / "gpu_check.py", "--quick", "--seconds", "0.2", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "gpu_check.json").read_text())["results"]["run"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_its_competitors_compute_the_same(make_bundle, monkeypatch, compiled):
    import torch

    monkeypatch.syspath_prepend(str(FOLDER))
    from gpu_competitors import TorchOnGpu

    if compiled:  # graphs and kernels are the compiler's; that the ring is bound rightly needs neither
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    path = make_bundle(batch_size=2, config={"d_model": 32})
    model = load(path, backend="cpu")
    stream, competitor = model.stream(), TorchOnGpu(model, compiled, "cpu")
    tokens = np.random.default_rng(0).integers(0, 60, (2, 5)).astype(np.int32)
    competitor.fill(tokens)
    for _ in range(-(-model.memory_length // 4) + 1):
        stream.step(tokens[:, :4])
    stream.step(tokens[:, :1])
    for seed in range(20):
        tokens = np.random.default_rng(seed).integers(0, 60, (2, 5)).astype(np.int32)
        np.testing.assert_allclose(competitor.logprobs(tokens[:, :1]), stream.step(tokens[:, :1]), rtol=0, atol=1e-4)
        np.testing.assert_allclose(competitor.score(tokens), stream.score(tokens), rtol=0, atol=1e-4)
