"""The comparison with other ways: what is not the bundle's step is not timed, and a stored run is printed again."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import rivals
import torch
from all_steps import made, names
from foreign_steps import AbsentError
from msgspec import to_builtins
from turns import Timed, ratio

SCRIPT = Path(rivals.__file__)


def timed(*cpu: float) -> Timed:
    return Timed(cpu=cpu, p50=1.0, p99=2.0)


def test_the_ratio_is_taken_round_by_round_to_the_fastest_of_the_others() -> None:
    ours, fast, slow = timed(20, 20, 60), timed(10, 10, 30), timed(40, 40, 40)
    assert ratio(ours, [slow, fast]) == 2
    assert ratio(ours, []) is None


def test_stored_runs_are_printed_again_and_the_last_one_counts(tmp_path, capsys, monkeypatch) -> None:
    files = []
    for name, cpu in (("old", 90.0), ("new", 30.0)):
        row = rivals.Row(
            step="lstm", threads=1, ways={"bundle": timed(cpu), "onnx": timed(20.0)}, left_out={"torch": "x"}
        )
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps({"conditions": f"A {name} machine.", "results": to_builtins([row])}))
    monkeypatch.setattr(sys, "argv", ["rivals.py", "--reprint", *map(str, files)])
    assert rivals.main() == 0
    said = capsys.readouterr().out
    assert "| lstm | 1 | 30 | 20 | 1.50 | – |" in said
    assert "| lstm | 1 | torch | x |" in said
    assert said.endswith("A new machine.\n")
    assert "| 90 |" not in said


def test_every_name_is_of_a_step_that_says_what_it_needs_where_that_is_absent() -> None:
    for name in names():
        if name.startswith(("gtcrn", "dtln")):
            with pytest.raises(AbsentError, match="--outside FOLDER"):
                made(name, None)
    with pytest.raises(AbsentError, match="has no gtcrn/stream"):
        made("gtcrn", Path(__file__).parent)


@pytest.mark.slow(keep=1)
def test_what_computes_something_else_is_not_timed(tmp_path) -> None:
    step = made("slices-newest", None)
    bundle = rivals.bundle_of("slices-newest", step, tmp_path)
    torch.nn.init.zeros_(step.source.module.mix[0].weight)
    options = Namespace(ways=("torch", "onnx"), rounds=1, seconds=0.01, profile=None)
    row = rivals.measure("slices-newest", step, bundle, tmp_path / "files", 1, options)
    assert [*row.ways] == ["bundle"]
    assert all("computes something else" in why for why in row.left_out.values())
    assert [*row.left_out] == ["torch", "onnx"]


@pytest.mark.slow(keep=1)
def test_it_runs_and_its_profile_names_the_operators_of_both_graphs(tmp_path) -> None:
    command = [sys.executable, SCRIPT, "--quick", "--only", "lstm-1x256-b1", "--out", tmp_path, "--profile", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "rivals.json").read_text())["results"]
    assert [*row["ways"]] == ["bundle", "torch", "onnx", "onnx-tracer"]
    assert row["left_out"] == {}
    ours, best = row["profiles"]
    assert ours == "bundle"
    assert best in {"onnx", "onnx-tracer"}, "which of the two is faster, the machine decides"
    assert "LSTM" in row["profiles"][best]["operators"]
    assert "FusedGemm" in row["profiles"]["bundle"]["operators"]  # a bundle's cell is taken apart; the engine fuses it
    assert (tmp_path / "rivals.md").read_text().rstrip() == done.stdout.rstrip()
