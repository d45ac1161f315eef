"""The benchmark of loads against a replacing writer runs, and no model is of two bundles where files are renamed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "soak" / "loads_under_replacement.py"


@pytest.mark.slow(keep=1)
@pytest.mark.skipif(sys.platform != "linux", reason="folders are exchanged in one step on Linux only")
@pytest.mark.parametrize("way", ["exchange", "link", "in-place"])
def test_loads_beside_a_writer_give_one_bundle_or_the_other(way, tmp_path):
    command = [sys.executable, str(SCRIPT), "--json", "--way", way, "--folder", str(tmp_path), "--readers", "2"]
    done = subprocess.run([*command, "--loads", "60"], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = json.loads(done.stdout)
    assert "wrong" not in found or way == "in-place"
    assert found.get("old", 0) + found.get("new", 0) > 0
