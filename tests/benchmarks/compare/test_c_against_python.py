"""The benchmark of a bundle in C and in Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import c_against_python
import pytest
from building import ROOT, compiler, done, sanitized


def test_sides_take_turns_in_going_first() -> None:
    assert c_against_python.turns(3) == [("C", "Python"), ("Python", "C"), ("C", "Python")]
    assert [sides[0] for sides in c_against_python.turns(4, ("a", "b", "c"))] == ["a", "b", "c", "a"]


def test_ratios_are_taken_round_by_round() -> None:
    *_, line = (
        c_against_python.table("µs", {"GRU": {"C": [1.0, 2.0, 4.0], "Python": [3.0, 4.0, 4.0]}}).markdown().splitlines()
    )
    assert line == "| GRU | 2 | 4 | 2.00 (1.50 … 2.50) |"


@pytest.mark.slow
@pytest.mark.timeout(1200)  # whoever comes first builds
def test_it_runs_both_sides(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    built = sanitized(tmp_path_factory.getbasetemp())
    done(["cmake", "--install", built, "--prefix", tmp_path / "there"])
    script = ROOT / "benchmarks" / "compare" / "c_against_python.py"
    found = subprocess.run(
        [sys.executable, script, "--quick", "--installed", tmp_path / "there", "--out", tmp_path],
        env=os.environ | {"CXX": compiler(built, "CXX"), "CXXFLAGS": "-fsanitize=address,undefined"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    results = json.loads((tmp_path / "c_against_python.json").read_text())["results"]
    rows = ["tiny, ring, 1", "tiny, ring, 4", "tiny, rolled, 1", "tiny, rolled, 4", "GRU, B 1", "GRU, B 16"]
    assert list(results["steps"]) == rows
    assert list(results["starts"]) == list(results["peaks"]) == [row for row in rows if not row.endswith("4")]
    assert all(
        figure > 0 for part in results.values() for sides in part.values() for each in sides.values() for figure in each
    )
