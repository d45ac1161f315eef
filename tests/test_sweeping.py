"""The sweep: which slow tests it runs, and what becomes of one that fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sweeping import MOST, listed

ROOT = Path(__file__).parents[1]
INI = """
[pytest]
addopts = --strict-markers -p xdist
pythonpath = {helpers}
markers =
    slow: takes long
    gpu: needs a GPU
"""
SLOW = """
import os
from pathlib import Path
import pytest

def test_a_fast_one_that_fails():
    assert False

@pytest.mark.slow
def test_one_that_passes(): pass

@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("kind", ["first time", "always"])
def test_one_that_fails(kind):
    marks = Path(__file__).parent / kind
    ran = len(marks.read_text()) if marks.exists() else 0
    marks.write_text("x" * (ran + 1))
    assert kind == "first time" and ran, f"run {ran + 1}, worker {os.environ.get('PYTEST_XDIST_WORKER')}"

@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_many_that_fail(number):
    assert False

@pytest.mark.slow(keep=8)
@pytest.mark.parametrize("color", ["red", "green"])
@pytest.mark.parametrize("number", [*range(8), pytest.param(99, marks=pytest.mark.gpu)])
def test_many_that_pass(color, number): pass
"""


def sweep(folder: Path, words: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A sweep of the tests above whose names hold the words."""
    (folder / "pytest.ini").write_text(INI.format(helpers=ROOT / "tests" / "helpers"))
    (folder / "conftest.py").write_text('pytest_plugins = ["sweeping"]\n')
    (folder / "test_slow.py").write_text(SLOW)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # most of a second goes into plugins that nothing here needs
    command = [sys.executable, "-m", "pytest", "-k", words, *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_failure_is_run_once_more_alone_and_both_results_are_printed(tmp_path):
    done = sweep(tmp_path, "first or passes or fast", "--sweep=sample", "-n", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "AssertionError: run 1, worker gw0" in done.stdout
    assert "1 failed, 1 passed" in done.stdout
    name = "test_slow.py::test_one_that_fails[first time]"
    assert f"first run FAILED, second run alone PASSED: {name}\n" in done.stdout
    assert "it is not steady; enter it in tests/unsteady.md with its cause" in done.stdout
    assert (tmp_path / "first time").read_text() == "xx"
    assert "fast" not in done.stdout


def test_one_that_fails_twice_fails_the_sweep(tmp_path):
    done = sweep(tmp_path, "always", "--sweep=sample")
    assert done.returncode == 1
    assert "AssertionError: run 1, worker None" in done.stdout
    assert "AssertionError: run 2, worker None" in done.stdout
    assert "first run FAILED, second run alone FAILED: test_slow.py::test_one_that_fails[always]" in done.stdout


def test_a_file_that_cannot_be_read_fails_the_sweep(tmp_path):
    (tmp_path / "test_unread.py").write_text("import there_is_no_such_module\n")
    done = sweep(tmp_path, "passes or first", "--sweep=sample", "-n", "1")
    assert done.returncode != 0, done.stdout
    assert "there_is_no_such_module" in done.stdout


def test_many_failures_are_no_accident_and_a_sweep_of_all_runs_all(tmp_path):
    done = sweep(tmp_path, "many", "--sweep=all")
    assert done.returncode == 1
    assert "8 failed, 18 passed" in done.stdout
    assert "sweep: 29 of 29 slow tests" in done.stdout
    assert f"8 tests failed; more than {MOST} are no accident, so none is run once more" in done.stdout
    assert "second run alone" not in done.stdout


def test_a_sample_runs_few_variants_and_those_for_a_gpu_beside_the_others(tmp_path):
    done = sweep(tmp_path, "many_that_pass", "--sweep=sample", "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sweep: 14 of 29 slow tests; make sweep ALL=1 runs all" in done.stdout
    ran = re.findall(r"many_that_pass\[(\d+)-(\w+)\] PASSED", done.stdout)
    assert sorted(color for number, color in ran if number == "99") == ["green", "red"], "what needs a GPU has its own"
    assert sorted(number for number, _ in ran if number != "99") == list("01234567"), "each value once"
    assert {color for number, color in ran if number != "99"} == {"green", "red"}


def test_every_test_that_is_listed_as_not_steady_is_there():
    for name, cause in listed():
        file, _, function = name.partition("[")[0].partition("::")
        assert f"def {function}(" in (ROOT / file).read_text("utf-8"), name
        assert len(cause) > 20, f"{name}: say why its result depends on more than the code"
