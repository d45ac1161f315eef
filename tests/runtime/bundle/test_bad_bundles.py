"""Every bad bundle of the shared corpus: refused, or told by the self-test, in bounded time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from conformance import spoiling

SECONDS, MEMORY = 2.0, 256 << 20
"""Processor seconds of one bundle, and the largest memory of its process, engine included."""
CHILD = """
import json, pathlib, resource, sys, time
import txl_runtime
from txl_runtime.selftest import run_selftest

pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (1 << 30)  # engines map more than they use
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

def outcome(line):
    try:
        path, tried = json.loads(line)
        model = txl_runtime.load(path, backend="cpu", threads=1, trial=tried)
    except txl_runtime.TxlError as error:
        return "refused", str(error)
    try:
        model.vocabulary
        model.bundle.report()
        result = run_selftest(model)
    except txl_runtime.TxlError as error:
        return "refused when used", str(error)
    return "loads" if result.passed else "self-test fails", ""

for line in sys.stdin:
    started = time.process_time()
    try:
        found = outcome(line)
    except BaseException as error:
        found = type(error).__name__, str(error)
    status = pathlib.Path("/proc/self/status").read_text()  # getrusage counts what the parent had as well
    memory = int(status.partition("VmHWM:")[2].split()[0]) << 10
    print(json.dumps([*found, time.process_time() - started, memory]), flush=True)
"""
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pipes, devices and limits of memory")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """Open each bundle in a process of limited memory: [outcome, message, seconds, memory]."""
    folder = tmp_path_factory.mktemp("bad")
    cases = spoiling.index()["cases"]
    for number, case in enumerate(cases):
        (folder / str(number)).mkdir()
        spoiling.build(case, folder / str(number) / "bundle.txl")
    found: dict[str, list[object]] = {}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    left = list(enumerate(cases))
    while left:  # anew after a case that ended the process
        asked = [(str(folder / str(n) / "bundle.txl"), case["expected"] == spoiling.TRIED) for n, case in left]
        try:
            done = subprocess.run(
                [sys.executable, "-c", CHILD],
                input="".join(f"{json.dumps(one)}\n" for one in asked).encode(),
                capture_output=True,
                timeout=60,
                env=environment,
                check=False,
            )
            said, ended = done.stdout, f"exit code {done.returncode}"
        except subprocess.TimeoutExpired as expired:
            said, ended = expired.stdout or b"", "hangs"
        lines = [json.loads(line) for line in said.decode().splitlines() if line.startswith("[")]
        assert lines or left != list(enumerate(cases)), ended
        for (_, case), line in zip(left, lines, strict=False):
            found[case["name"]] = line
        left = left[len(lines) :]
        if left:
            found[left[0][1]["name"]] = [ended, "", 0.0, 0]
            left = left[1:]
    return found


@pytest.mark.parametrize("case", spoiling.index()["cases"], ids=lambda case: case["name"])
def test_bad_bundle(case, outcomes):
    outcome, message, seconds, memory = outcomes[case["name"]]
    shown = message[:300]
    assert outcome in spoiling.allowed(case["expected"]), f"{case['wrong']}: {shown}"
    assert seconds < SECONDS, f"{seconds} s: {shown}"
    assert memory < MEMORY, f"{memory >> 20} MiB: {shown}"
    if outcome.startswith("refused"):
        printable, length, named = message.isprintable(), len(message), "bundle.txl" in message
        assert printable, shown
        assert length < 4000, shown
        assert named, shown


def test_every_file_of_the_corpus_is_of_some_case_and_every_case_has_a_name_of_its_own():
    cases = spoiling.index()["cases"]
    assert {change["from"] for case in cases for change in case["changes"] if change["do"] == "put"} == {
        path.name for path in (spoiling.CORPUS / "files").iterdir()
    }
    assert len({case["name"] for case in cases}) == len(cases)
    assert sum(path.stat().st_size for path in spoiling.CORPUS.rglob("*") if path.is_file()) < 1 << 20


def test_the_corpus_has_every_kind_of_case():
    cases = spoiling.index()["cases"]
    assert len(cases) >= 80
    assert {case["base"] for case in cases} == {"step", "transformer_xl", "half"}
    assert len({case["promise"] for case in cases}) >= 10


@pytest.mark.parametrize("base", sorted(spoiling.index()["bases"]))
def test_the_bases_are_good(base, tmp_path):
    from txl_runtime import load
    from txl_runtime.selftest import run_selftest

    path = spoiling.build({"base": base, "changes": []}, tmp_path / "good.txl")
    assert run_selftest(load(path, backend="cpu", threads=1)).passed
