"""The samples around files that somebody else made; the one for voices is tried in tests/outside."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import txl_export
from small_files import leaky

pytestmark = pytest.mark.slow(keep=9)

CONTROL = Path(__file__).parents[2] / "samples" / "found" / "control.py"


def test_a_policy_runs_at_fifty_steps_a_second_and_says_what_they_took(tmp_path):
    bundle = tmp_path / "policy.txl"
    txl_export.export(leaky(tmp_path / "policy.onnx"), bundle, batch_size=2)
    command = [sys.executable, str(CONTROL), str(bundle), "0.1"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("5 steps at 50 Hz, the longest ")
    assert re.search(r"of 20 ms, woken up to [\d.]+ ms late, \d periods late\n$", said)
