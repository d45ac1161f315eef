"""The benchmark of a bundle in JavaScript and in Python."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from scripting import ROOT, driver, module

pytestmark = pytest.mark.device


def test_it_runs_all_three_sides(tmp_path: Path) -> None:
    driver()
    module("onnxruntime-web/package.json")
    command = [sys.executable, ROOT / "benchmarks/compare/javascript.py", "--quick", "--out", tmp_path]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    found = json.loads((tmp_path / "javascript.json").read_text("utf-8"))["results"]
    assert list(found["steps"]) == list(found["starts"]) == ["GRU"]
    for part in found.values():
        assert list(part["GRU"]) == ["Python", "Node", "wasm"]
        assert all(figure > 0 for side in part["GRU"].values() for figure in side)
