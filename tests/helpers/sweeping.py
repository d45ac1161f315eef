"""The sweep: the slow tests alone, a sample of them that is always the same, and a second run of those that fail.

`make sweep` calls `pytest --sweep=sample`. Of a test with many variants it runs a few, those that `sample` chooses;
`make sweep ALL=1` calls `pytest --sweep=all`, which runs every one.

A slow test that fails is run once more, alone in a fresh process, and both results are printed. One that passes then is
not steady: it has to be entered in `tests/unsteady.md` with its cause. Fast tests are in no sweep and run once.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

KEEP = 1
"""Variants of one slow test that a sample runs, where its marker says nothing else."""
SEED = 1
MOST = 5
"""Failures up to which each is run once more; more of them are no accident."""
UNSTEADY = Path(__file__).parents[1] / "unsteady.md"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sweep", choices=("sample", "all"), help="the slow tests alone, a sample of them or all")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.sweep:
        config.pluginmanager.register(Sweep(config), "sweep")


def sample(name: str, variants: Sequence[dict[str, str]], keep: int) -> set[int]:
    """Return the variants of a test that a sample runs: in random order, first those with most values not met before.

    Args:
        name: the test; the choice depends on it, on its variants and on nothing else.
        variants: each one's parameters, and how their values are written.
        keep: how many are chosen.
    """
    left = list(range(len(variants)))
    random.Random(f"{SEED} {name}").shuffle(left)
    chosen: set[int] = set()
    met: set[tuple[str, str]] = set()
    while left and len(chosen) < keep:
        best = max(left, key=lambda place: len(variants[place].items() - met))  # the first of several
        left.remove(best)
        chosen.add(best)
        met |= variants[best].items()
    return chosen


@pytest.fixture(scope="session")
def whole_sweep(pytestconfig: pytest.Config) -> bool:
    """True if a test that goes through many seeds goes through all of them."""
    return bool(pytestconfig.option.sweep == "all")


class Sweep:
    """The plugin of `--sweep`. With xdist it is in every process; the workers choose, and count."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.counted: tuple[int, int] | None = None
        """The number of slow tests that are run, and of all."""
        self.failed: dict[str, None] = {}
        """Tests that failed, each once."""
        self.unread = 0
        """Files that could not be collected, and failures after a test: with one of them nothing is run once more."""
        self.again: dict[str, tuple[bool, str]] = {}
        """Those that were run once more: whether it passed, and what it printed."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave what the sweep does not run out."""
        tests: dict[tuple[str, bool], list[pytest.Item]] = {}
        for item in items:
            if item.get_closest_marker("slow"):  # what needs a GPU is chosen beside the others, not in their place
                key = item.nodeid.partition("[")[0], item.get_closest_marker("gpu") is not None
                tests.setdefault(key, []).append(item)
        chosen: set[pytest.Item] = set()
        for (name, _), variants in tests.items():
            keep = variants[0].get_closest_marker("slow").kwargs.get("keep", KEEP)
            given = [getattr(item, "callspec", None) for item in variants]
            values = [{key: repr(value) for key, value in each.params.items()} if each else {} for each in given]
            keep = len(variants) if self.config.option.sweep == "all" else keep
            chosen |= {variants[place] for place in sample(name, values, keep)}
        self.counted = len(chosen), sum(map(len, tests.values()))
        self.config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["sweep"] = self.counted

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take a worker's count."""
        self.counted = getattr(node, "workeroutput", {}).get("sweep", self.counted)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count what cannot be run at all."""
        self.unread += report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what failed."""
        if report.failed:
            self.failed[report.nodeid] = None
            self.unread += report.when == "teardown"  # it may be a different test's fault, which alone would not show

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Once the workers are gone: run once more what failed; all is well if all of it passes."""
        if hasattr(self.config, "workerinput") or exitstatus != pytest.ExitCode.TESTS_FAILED:
            return
        if 0 < len(self.failed) <= MOST and not self.unread:
            self.again = {name: run_alone(name, self.config.rootpath) for name in self.failed}
            if all(passed for passed, _ in self.again.values()):
                session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Both results of every test that failed, and how many tests the sample has."""
        write, known = terminalreporter.write_line, dict(listed())
        if len(self.failed) > MOST:
            write(f"{len(self.failed)} tests failed; more than {MOST} are no accident, so none is run once more")
        for name, (_, printed) in self.again.items():
            terminalreporter.section(f"second run of {name}")
            write(printed)
        for name, (passed, _) in self.again.items():
            write(f"first run FAILED, second run alone {'PASSED' if passed else 'FAILED'}: {name}")
            if passed:
                entry = f"enter it in {UNSTEADY.parent.name}/{UNSTEADY.name} with its cause"
                write(f"  it is not steady; {'its known cause: ' + known[name] if name in known else entry}")
        if self.counted:
            write("sweep: {} of {} slow tests; make sweep ALL=1 runs all".format(*self.counted))


def run_alone(name: str, root: Path) -> tuple[bool, str]:
    """One test in a process of its own: whether it passed, and the end of what it printed."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", name]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode == 0 and " 1 passed" in done.stdout, done.stdout[-8000:]


def listed() -> Iterator[tuple[str, str]]:
    """The tests that are known not to be steady, each with its cause."""
    yield from re.findall(r"^\* `([^`]+)`: (.+)$", UNSTEADY.read_text("utf-8"), re.MULTILINE)
