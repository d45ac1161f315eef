"""The table of steps: which cells and ways it has, and that a stored run is printed again."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import steps_table
import txl_runtime
from msgspec import to_builtins
from steps_table import Cell, Found, bundles, cells_of
from turns import Timed, in_turns
from txl_runtime.errors import UsageError

SCRIPT = Path(steps_table.__file__)
ROOT = SCRIPT.parents[2]
CELL = Cell("tiny", 7, 2, 1)


def found(threads: int, cpu: float) -> Found:
    ours, other = Timed(cpu=(10e3, 20e3), p50=15e3, p99=0), Timed(cpu=(cpu, 2 * cpu), p50=8e3, p99=0)
    return Found(
        cell=Cell("4x192", 128, 1, threads),
        gb_per_second=20.0,
        timed={"decode": {"bundle fp32": ours, "onnx-kv": other}},
        sizes={"decode": {"bundle fp32": 60_000_000, "onnx-kv": 80_000_000}},
        ways={"onnx-kv": ("a file", "max_abs 1e-06, at most 0.001"), "openvino": ("left out", "absent")},
    )


def test_stored_runs_are_printed_again_with_shares_of_the_floor(tmp_path, capsys, monkeypatch) -> None:
    files = []
    for name, runs in (("old", [found(1, 99e3)]), ("new", [found(1, 5e3), found(2, 5e3)])):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps({"conditions": f"A {name} machine.", "results": to_builtins(runs)}))
    monkeypatch.setattr(sys, "argv", ["steps_table.py", "--reprint", *map(str, files)])
    assert steps_table.main() == 0
    said = capsys.readouterr().out
    assert "| 4x192 | 128 | 1 | 1 | decode | bundle fp32 | 15 | 1.00 | 15 | 60 | 3 | 20% |" in said
    assert "| 4x192 | 128 | 1 | 1 | decode | onnx-kv | 7.5 | 0.50 | 8 | 80 | 4 | 53% |" in said
    assert "| 4x192 | 128 | 1 | 2 | decode | onnx-kv | 7.5 | 0.50 | 8 | 80 | 4 | 50% |" in said, "of the wall time"
    assert "| 4x192 | 128 | 1 | 1 | onnx-kv | a file | max_abs 1e-06, at most 0.001 |" in said
    assert "| 4x192 | 128 | 1 | 1 | openvino | left out | absent |" in said
    assert said.endswith("A new machine.\n")


def test_options_choose_cells_and_without_any_there_are_a_few() -> None:
    few = Namespace(model=None, memory=None, batch=None, threads=[1, 2])
    assert len(cells_of(few)) == 2 * len(steps_table.SHORT)
    one = Namespace(model=["12x512", "4x192"], memory=[640, 128], batch=[8], threads=[2])
    assert cells_of(one) == [Cell("12x512", 640, 8, 2), Cell("4x192", 128, 8, 2)]
    assert {cell.model for cell in cells_of(Namespace(**vars(few) | {"batch": [1]}))} == {"12x512", "4x192", "wt103"}


def test_a_bundle_has_a_row_for_every_way_to_load_that_this_runtime_has(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(steps_table, "LOADS", {"": {}, " (lean)": {"lean": True}, " (new)": {"unheard_of": True}})
    made = bundles(CELL, ("fp32", "int8"), tmp_path / "old", tmp_path)
    assert [*made] == ["bundle fp32 (lean)", "before fp32", "bundle int8", "bundle int8 (lean)", "before int8"]
    more = bundles(CELL, ("int8",), None, tmp_path, ("fp32", "fp16"))
    assert [*more][-2:] == ["native int8, K and V fp32", "native int8, K and V fp16"]
    asked = []
    monkeypatch.setattr(steps_table, "bundle_of", lambda *what: asked.append(what) or tmp_path)
    monkeypatch.setattr(txl_runtime, "load", lambda path, **how: pytest.fail(f"{how}"))
    with pytest.raises(pytest.fail.Exception, match=r"\{'threads': 1, 'lean': True\}"):
        made["bundle int8 (lean)"]()
    with pytest.raises(pytest.fail.Exception):
        made["before int8"]()
    assert asked == [(CELL, "int8", ROOT, tmp_path / "bundles"), (CELL, "int8", tmp_path / "old", tmp_path / "before")]


def test_a_checkout_that_cannot_export_is_named_with_its_last_line(tmp_path) -> None:
    (tmp_path / "benchmarks" / "shared").mkdir(parents=True)
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "shared" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "shared" / "models.py").write_text("def random_bundle(path, values): pass\n")
    with pytest.raises(UsageError, match=r"did not export tiny-m7-b2-int8\.txl: TypeError: random_bundle\(\) got"):
        steps_table.bundle_of(CELL, "int8", tmp_path, tmp_path / "before")


def test_slices_of_other_processes_take_turns_with_calls_of_this_one() -> None:
    order: list[str] = []

    def away(seconds: float) -> tuple[float, list[float]]:
        order.append(f"away {seconds}")
        return 7.0, [9.0, 11.0]

    def here(index: int) -> None:
        order.append("here")

    timed = in_turns({"here": here}, 2, 0.0, {"away": away}, lambda: order.append("machine"))
    assert timed["away"] == Timed(cpu=(7.0, 7.0), p50=10.0, p99=11.0)
    turns = [step for i, step in enumerate(order) if step != order[i - 1]]
    assert turns == ["machine", "here", "away 0.0", "machine", "away 0.0", "here"]


@pytest.mark.slow(keep=1)
def test_it_runs_beside_another_checkout_with_bundles_that_are_there(tmp_path) -> None:
    work = tmp_path / "work"
    made = steps_table.bundle_of(CELL, "fp32", ROOT, work / "bundles")
    shutil.copytree(made, work / "before" / made.name)
    command = [sys.executable, SCRIPT, "--quick", "--against", "onnx-kv", "--before", ROOT, "--work", work, "--native"]
    done = subprocess.run(
        [*command, "--out", tmp_path / "out"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "exports" not in done.stderr
    (cell,) = json.loads((tmp_path / "out" / "steps_table.json").read_text())["results"]
    assert {*cell["ways"]} == {"bundle fp32", "bundle fp32 (small pages)", "before fp32", "onnx-kv"}
    assert "left out" not in str(cell["ways"])
    for timed in cell["timed"].values():
        assert {*timed} == {"bundle fp32", "bundle fp32 (small pages)", "before fp32", "onnx-kv"}
        assert all(way["cpu"][0] > 0 and way["p50"] > 0 for way in timed.values())
    assert cell["sizes"]["decode"]["bundle fp32"] == cell["sizes"]["decode"]["before fp32"]
    assert (tmp_path / "out" / "steps_table.md").read_text().rstrip() == done.stdout.rstrip()
