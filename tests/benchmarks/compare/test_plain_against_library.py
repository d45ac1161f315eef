"""The benchmark of packages in plain C."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from building import ROOT, compiler, done, sanitized
from plain_c import need


@pytest.mark.slow
@pytest.mark.timeout(1200)  # whoever comes first builds
def test_it_packages_two_steps_and_runs_three_sides(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    need("cc")
    built = sanitized(tmp_path_factory.getbasetemp())
    done(["cmake", "--install", built, "--prefix", tmp_path / "there"])
    script = ROOT / "benchmarks" / "compare" / "plain_against_library.py"
    found = subprocess.run(
        [sys.executable, script, "--quick", "--installed", tmp_path / "there", "--out", tmp_path],
        env=os.environ | {"CXX": compiler(built, "CXX"), "CXXFLAGS": "-fsanitize=address,undefined"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    results = json.loads((tmp_path / "plain_against_library.json").read_text())["results"]
    assert list(results) == ["gru-1x256-b1", "txl, 1", "txl, 8"]
    for each in results.values():
        assert 0 < each["error"] < 1e-4
        assert all(size > 0 for size in each["sizes"].values())
        assert list(each["steps"]) == ["plain C", "library", "Python"]
        assert all(figure > 0 for side in each["steps"].values() for figure in side)
