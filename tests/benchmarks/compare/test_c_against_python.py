"""The benchmarks of a bundle in C, in plain C and in Python."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from building import ROOT, compiler, done, sanitized
from plain_c import need


@pytest.fixture
def results(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Run a benchmark with --quick over the library as it is installed, and read its figures."""

    def measure(name: str) -> dict[str, Any]:
        built = sanitized(tmp_path_factory.getbasetemp())
        done(["cmake", "--install", built, "--prefix", tmp_path / "there"])
        script = ROOT / "benchmarks" / "compare" / f"{name}.py"
        command = [sys.executable, script, "--quick", "--installed", tmp_path / "there", "--out", tmp_path]
        flags = {"CXX": compiler(built, "CXX"), "CXXFLAGS": "-fsanitize=address,undefined"}
        done(command, timeout=600, env=os.environ | flags)
        return json.loads((tmp_path / f"{name}.json").read_text())["results"]

    return measure


@pytest.mark.slow
@pytest.mark.timeout(1200)  # whoever comes first builds
def test_it_runs_both_sides(results: Callable[[str], dict[str, Any]]) -> None:
    found = results("c_against_python")
    rows = ["tiny, ring, 1", "tiny, ring, 4", "tiny, rolled, 1", "tiny, rolled, 4", "GRU, B 1", "GRU, B 16"]
    assert list(found["steps"]) == rows
    assert list(found["starts"]) == list(found["peaks"]) == [row for row in rows if not row.endswith("4")]
    assert all(
        figure > 0 for part in found.values() for sides in part.values() for each in sides.values() for figure in each
    )


@pytest.mark.slow(keep=0)
@pytest.mark.timeout(1200)
def test_packages_in_plain_c_are_made_of_two_steps_and_timed_on_three_sides(
    results: Callable[[str], dict[str, Any]],
) -> None:
    need("cc")
    found = results("plain_against_library")
    assert list(found) == ["gru-1x256-b1", "txl, 1", "txl, 8"]
    for each in found.values():
        assert 0 < each["error"] < 1e-4
        assert all(size > 0 for size in each["sizes"].values())
        assert list(each["steps"]) == ["plain C", "library", "Python"]
        assert all(figure > 0 for side in each["steps"].values() for figure in side)
