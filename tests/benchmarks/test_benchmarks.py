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
    "soak": (),  # a hundredth of it; its exit code says that nothing leaked, drifted or was wrong
}
OF_RTX = {"rtx_layouts": "ring, one operator", "rtx_weights": "one of two profiles", "device_floor": "Orin Nano"}


def run(name: str, *options: object) -> subprocess.CompletedProcess[str]:
    (script,) = FOLDER.rglob(f"{name}.py")
    command = [sys.executable, script, *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=dict(os.environ))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", [*QUICK, "hf_transfo_xl", "loads_under_replacement"])
def test_help_says_what_every_option_is_there(name: str) -> None:
    done = run(name, "--help")
    assert done.returncode == 0, done.stderr
    _, _, options = done.stdout.partition("options:\n")
    assert {"--quick", "--out", "--threads"} <= set(options.split()) or name == "loads_under_replacement"
    if name in ("faults", "loads_under_replacement", "soak"):
        told = " ".join(options.split()).split(" --")[1:]
        assert all(len(option.split()) > 3 for option in told), told
        assert "competitor" not in options, "these have none"


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


@pytest.mark.slow
def test_the_one_that_needs_another_environment_says_so() -> None:
    done = run("hf_transfo_xl", "--quick")
    assert done.returncode == 2
    assert "--python is not given, expected the python of the environment that has transformers 4.37.2" in done.stderr
