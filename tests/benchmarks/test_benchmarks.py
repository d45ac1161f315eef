"""Every benchmark runs: --quick takes it through all of its steps with tiny shapes. No figure is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"

QUICK = {
    "decode_and_prefill": ("--against", "torch-kv,onnx-hidden"),
    "evaluation_speedup": ("--engine", "bundle", "torch"),
    "large_vocabulary": ("--tails",),
    "faults": (),  # its exit code says that no case went wrong
    "load_and_memory": (),
    "lookup": (),
    "segment_lengths": ("--only", "small"),
    "soak": (),  # a hundredth of it; its exit code says that nothing leaked, drifted or was wrong
}
OF_RTX = {"rtx_layouts": "ring, one operator", "rtx_weights": "one of two profiles", "device_floor": "Orin Nano"}


def run(name: str, *options: object) -> subprocess.CompletedProcess[str]:
    (script,) = FOLDER.rglob(f"{name}.py")
    command = [sys.executable, script, *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=dict(os.environ))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", QUICK)
def test_a_benchmark_runs_and_writes_its_tables(name: str, tmp_path: Path) -> None:
    done = run(name, "--quick", "--threads", 1, "--out", tmp_path, *QUICK[name])
    assert done.returncode == 0, done.stderr
    text = (tmp_path / f"{name}.md").read_text()
    assert done.stdout.rstrip("\n") == text.rstrip("\n"), "what is printed is what is written"
    assert text.startswith("| ")
    assert "--quick: tiny shapes, the figures mean nothing" in text
    document = json.loads((tmp_path / f"{name}.json").read_text())
    assert document["results"]
    assert document["options"]["quick"] is True


@pytest.mark.slow(keep=0)
@pytest.mark.parametrize("name", OF_RTX)
def test_a_benchmark_of_engines_builds_every_form(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform or Python")
    done = run(name, "--quick", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert OF_RTX[name] in (tmp_path / f"{name}.md").read_text()
    assert json.loads((tmp_path / f"{name}.json").read_text())["results"]
