"""The benchmark of what Python costs around a step on a device."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the driver that does nothing is compiled by gcc")
def test_a_checkout_against_itself_costs_what_it_costs():
    command = [sys.executable, ROOT / "benchmarks" / "host_cost.py", ROOT, "--rounds", "3", "--seconds", "0.05"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)
    _, *rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == 9
    for work, old, python, c, *_, calls in rows:
        assert 0.4 < float(python) / float(old) < 2.5, f"{work}: both sides are the same"
        assert float(c) < 10_000
        assert calls == "9, 9", "launch, record, wait, and the context got, pushed and popped twice"
