"""The samples around files that somebody else made; the one for voices is tried in tests/outside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from step_models import B, Graph, StepModel, state
from txl_runtime.bundle.tables import Input, Output

CONTROL = Path(__file__).parents[2] / "samples" / "found" / "control.py"


def test_a_policy_runs_at_fifty_steps_a_second_and_says_what_they_took(tmp_path):
    model = StepModel(
        inputs=(Input(name="seen", dtype="float32", shape=("B", 4), role="feature"),),
        outputs=(Output(name="torque", dtype="float32", shape=("B", 4)),),
        states=(state("h", (B, 4), 0),),
    )
    graph = Graph()
    graph.add("Add", ["state.h.in", "seen"], "torque")
    graph.add("Identity", ["torque"], "state.h.out")
    model.add("step-1", 1, graph)
    bundle = model.write(tmp_path / "policy.txl")
    command = [sys.executable, str(CONTROL), str(bundle), "0.1"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("5 steps, the longest ")
    assert said.rstrip().endswith("of 20 ms")
