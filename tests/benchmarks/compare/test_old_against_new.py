"""The works on which two checkouts are timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import old_against_new
import pytest
import step_models
from old_against_new import ARRAYS, FEW, FIRST, PYTHON, SPREAD

ROOT = Path(__file__).parents[3]


@pytest.mark.slow(keep=1)
def test_each_side_may_open_its_own_bundle_with_several_numbers_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_models, "B", 4)
    for side in old_against_new.SIDES:
        bundle = step_models.counting((3, 1)).write(tmp_path / f"{side}.txl")
        manifest = json.loads((bundle / "manifest.json").read_text())
        (bundle / "manifest.json").write_text(json.dumps(manifest | {"joint": False, "counters": {}}))
    script = ROOT / "benchmarks" / "compare" / "old_against_new.py"
    command = [sys.executable, script, ROOT, "--bundles", tmp_path / "old.txl"]
    command += ["--new-bundles", tmp_path / "new.txl", "--threads", "1", "2", "--out", tmp_path / "figures.json"]
    command += ["--rounds", "1", "--seconds", "0.01", "--loads", "1"]
    subprocess.run(command, check=True, timeout=280, capture_output=True)
    found = json.loads((tmp_path / "figures.json").read_text())
    titles = [f"{tmp_path / 'old.txl'}, 1 thread", f"{tmp_path / 'old.txl'}, 2 threads"]
    assert list(found) == titles
    for figures in found.values():
        assert {*figures} == {*ARRAYS, FIRST, SPREAD, FEW, *PYTHON, *old_against_new.LOADS}
        assert all(values["old"] > 0 and values["new"] > 0 for rounds in figures.values() for values in rounds)
