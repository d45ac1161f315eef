"""The GPU check: an engine that dies ends alone, and what does not run is listed."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_check
import gpu_exercise
import gpu_items
import gpu_page
import gpu_smoke
import gpu_worker
import pytest
from frozen import frozen
from gpu_journal import ENDED, FAILED, NOT_RUN, OK, Found, Journal, read_found
from resealing import copied
from stand_ins.engine import open_stand_in
from txl_engines import build_bundle
from txl_runtime.device import choosing
from txl_runtime.device.choosing import NO_GPU
from txl_runtime.device.gpu import gpu_name

pytestmark = pytest.mark.device

FOLDER = Path(__file__).parents[3] / "benchmarks" / "gpu"


def test_a_process_that_never_wrote_anything_has_all_its_steps() -> None:
    item = gpu_items.Item("torch", "torch", "fp32", 1, Path("m.txl"))
    found = gpu_items.whole(item, [], "the process ended with code 3")
    expected = {"open": FAILED} | dict.fromkeys(("decode", "draw", "score"), NOT_RUN)
    assert [(step.name, step.state) for step in found] == [*expected.items()]
    assert "code 3" in found[0].reason
    cut = gpu_items.whole(item, [Found("open", OK)], "stopped")
    assert [(step.state, step.reason) for step in cut] == [(OK, ""), (ENDED, "stopped"), *[(NOT_RUN, "stopped")] * 2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--prepare", "--bundle", "m.txl"), "leave out one of them"),
        (("--batch", "1", "0"), "is 0, expected at least 1"),
        (("--vocabulary", "0"), "is 0, expected at least 1"),
        (("--segments", "0"), "is 0, expected at least 1"),
        (("--seconds", "-1"), "is -1, expected seconds from 0 on"),
        (("--budget", "nan"), "is nan, expected seconds from 0 on"),
        (("--precision", "fp16"), "--precision is of engines: name these too, e.g. --engine cuda"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_written(
    options: Sequence[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_check.main([*options, "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("program", "place"),
    [(gpu_check, place) for place in ("file", "file/below", "of_somebody")]
    + [(gpu_smoke, "file"), (gpu_exercise, "file/below")],
)
def test_results_that_cannot_be_written_are_one_line_before_anything_runs(
    program: Any, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "of_somebody" / "gpu_check.md").mkdir(parents=True)
    monkeypatch.setattr(gpu_items.Runner, "run", lambda *_: pytest.fail("an item was run"))
    monkeypatch.setattr(sys, "argv", ["program", "--out", str(tmp_path / place)])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{program.__name__}: cannot write {tmp_path / place.partition('/')[0]}")
    assert "expected --out FOLDER that can be written" in line
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("state", [OK, FAILED])
def test_the_page_says_what_was_prepared(state: str, tmp_path: Path) -> None:
    given = gpu_check.parsed(["--prepare", "--batch", "1", "8", "--out", str(tmp_path)])
    first, second = gpu_items.plan(given)
    outcomes = [
        gpu_items.Outcome(first, [Found("export", state, reason="" if state == OK else "ValueError: odd")]),
        gpu_items.Outcome(second, reason=gpu_items.PRESENT),
    ]
    page = gpu_page.write_page(outcomes, given, final=True)
    exported = int(state == OK)
    assert page.startswith(f"**prepared: {exported} exported, 1 there already, in {tmp_path / 'bundles'}**")
    assert ("export FAILED: ValueError: odd" in page) == (state == FAILED)
    assert "no GPU" not in page


def test_carried_packages_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "nvidia" / "cublas" / "lib" / "libcublasLt.so.13"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/lib")
    found = gpu_check.environment_of(tmp_path)
    assert found["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), *map(str, gpu_check.OWN), "before"]
    assert found["LD_LIBRARY_PATH"].split(os.pathsep) == [str(library.parent), "/opt/lib"]
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert "LD_LIBRARY_PATH" not in gpu_check.environment_of(None)


def test_a_step_that_the_budget_ends_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = "stopped: the budget of 3 s was spent"
    ends = {"build": signal.SIGTERM, "open": signal.SIGINT}

    def engine(journal: Journal, _: argparse.Namespace) -> None:
        for name, number in ends.items():
            with pytest.raises(KeyboardInterrupt):
                journal.run(name, lambda number=number: signal.raise_signal(number))

    monkeypatch.setattr(gpu_worker, "engine", engine)
    arguments = ["gpu_worker.py", "engine", "--bundle", "m.txl", "--name", "any", "--out", tmp_path, "--stopped", spent]
    monkeypatch.setattr(sys, "argv", [str(part) for part in arguments])
    before = {number: signal.getsignal(number) for number in ends.values()}
    try:
        assert gpu_worker.main() == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert [found.reason for found in read_found(tmp_path / "any.jsonl")] == [spent, "interrupted"]


def test_an_interrupt_while_a_worker_imports_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("import signal, time\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(60)\n")
    command = [sys.executable, FOLDER / "gpu_worker.py", "--help"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def worked(path: Path, folder: Path, engine: str = "cpu", update: str = "none") -> dict[str, Found]:
    given = argparse.Namespace(bundle=path, engine=engine, update=update, segments=6, seconds=0.01)
    journal = Journal("any", folder)
    gpu_worker.engine(journal, given)
    return {found.name: found for found in journal.found}


def test_whatever_a_step_raises_the_next_ones_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import txl_export.verifying as verifying

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("of a library")

    monkeypatch.setattr(verifying, "verify", fail)
    found = worked(frozen("ring"), tmp_path)
    assert found["verify"].state == FAILED
    assert "ZeroDivisionError: of a library" in found["verify"].reason
    assert {name: item.state for name, item in found.items() if name != "verify"} == dict.fromkeys(
        ("build", "open", "self-test", "decode", "draw", "score"), OK
    )
    assert found["decode"].figures["tokens/s"] > 0


def test_verify_is_not_run_where_its_packages_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; sys.modules |= {'torch': None, 'onnx_ir': None}; import gpu_worker as worker; "
    command = [sys.executable, "-c", program + "print(worker.not_verifiable())"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(FOLDER), *map(str, gpu_check.OWN)])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True, env=environment)
    reason = "verify needs torch, onnx-ir; put what is missing into --site"
    assert done.stdout.strip() == reason
    assert gpu_worker.not_verifiable() == "", "everything is here"
    monkeypatch.setattr(gpu_worker, "not_verifiable", lambda: reason)
    found = worked(frozen("ring"), tmp_path)
    assert (found["verify"].state, found["verify"].reason) == (NOT_RUN, reason)
    assert found["decode"].state == OK


@pytest.mark.parametrize("update", ["none", "rolled"])
def test_an_engine_takes_every_step_on_the_stand_in(
    update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "open_device", lambda name, bundle, rule: open_stand_in(bundle, rule, name))
    path = copied(frozen("ring"), tmp_path / "small.txl")
    found = worked(path, tmp_path, engine="cuda", update=update)
    assert {name: item.reason for name, item in found.items() if item.state != OK} == {}
    assert list(found) == list(gpu_items.STEPS["engine"])
    assert found["open"].figures["update"] == ("ring" if update == "none" else update)
    assert "recorded" in found["score"].figures["recorded"].values()
    assert any("self-test on Fake RTX" in sidecar.read_text() for sidecar in path.rglob("*.json")), "it is noted"


def test_rolled_engines_beside_those_of_a_ring_are_not_verified_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "open_device", lambda name, bundle, rule: open_stand_in(bundle, rule, name))
    path = copied(frozen("ring"), tmp_path / "small.txl")
    build_bundle(path, "cuda", update="ring")
    found = worked(path, tmp_path, engine="cuda", update="rolled")
    assert found["verify"].state == NOT_RUN
    assert "has engines of ring memory too" in found["verify"].reason


@pytest.mark.skipif(gpu_name() is not None, reason="there is a GPU here")
def test_an_engine_that_does_not_open_leaves_the_rest_out(tmp_path: Path) -> None:
    found = worked(frozen("ring"), tmp_path, engine="tensorrt")
    assert found["build"].state == FAILED
    assert {item.reason for name, item in found.items() if name != "build"} == {"its engines were not built"}


def run(*options: object, python: str = sys.executable, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [python, FOLDER / "gpu_check.py", *map(str, options)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False, env=dict(os.environ) | environment
    )


@pytest.mark.skipif(gpu_name() is not None, reason="there is a GPU here")
def test_without_a_gpu_nothing_is_run_and_nothing_is_wrong(tmp_path: Path) -> None:
    done = run("--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "0 run" in done.stdout
    page = (tmp_path / "gpu_check.md").read_text()
    assert page.count(NO_GPU) == 1
    assert done.stdout.rstrip("\n") == page.rstrip("\n"), "what is printed is what is written"
    results = json.loads((tmp_path / "gpu_check.json").read_text())["results"]
    assert (results["run"], results["gpu"], results["engines"]) == (0, None, [])


@pytest.mark.gpu
def test_with_a_gpu_everything_there_is_runs(tmp_path: Path) -> None:
    if gpu_name() is None:
        pytest.skip("no usable CUDA driver was found, expected an NVIDIA GPU and its driver")
    done = run("--engine", *gpu_check.ENGINES, "--quick", "--seconds", "0.2", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "gpu_check.json").read_text())["results"]["run"] > 0
