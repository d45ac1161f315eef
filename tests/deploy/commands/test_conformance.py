"""`txl-deploy conformance`, as a user types it: the table, what fails, exit codes, a terminal."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conforming import FOLDER, WRONG, inside
from ptys import BAR, COMMAND, CTRL_C, in_a_terminal
from stand_ins.wrong_drivers import faulty
from support import call_main, until

from txl_deploy import console
from txl_deploy.conformance.driver import Driver

Call = Callable[..., tuple[int, str, str]]
VECTORS = str(len((FOLDER / "vectors" / "policy-1.jsonl").read_text().splitlines()))


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """The verb in this process, and Python's driver as well."""

    def run(*arguments: object, columns: int = 100) -> Any:
        monkeypatch.setattr(console.stdout, "width", columns)  # which it took when it was imported, perhaps long ago
        with inside():
            return call_main(["conformance", "--folder", FOLDER, *arguments], monkeypatch, capfd)

    return run


def test_what_passes_is_one_row_for_each_bundle(call: Call) -> None:
    code, said, beside = call("--only", "lockstep", "--only", "policy-1")
    assert code == 0
    rows = {line.split()[0]: line.split()[1:] for line in said.splitlines() if line.split()}
    assert rows["policy-1"][:5] == [VECTORS, VECTORS, "0", "0", "0"]
    assert rows["lockstep"][5] == "0.0001"
    assert rows["verdict"] == ["passed"]
    assert "ONNX Runtime" in said
    assert "vectors" in beside


def test_what_fails_is_named_at_most_a_screen_of_it(call: Call) -> None:
    with faulty("reset forgets the first state"):
        code, said, _ = call("--only", "zeros")
    assert code == 1
    told = " ".join(said.split())  # a sentence goes on in the next line
    wanted = r"zeros, \d+ \(reset, initial\): step 5, state: states\.\S+ differs by 0\.\d+, limit 0\.0001"
    assert re.search(wanted, told), said
    with faulty("idle sequences advance"):
        code, said, _ = call("--only", "ring", "--only", "zeros")
    assert code == 1
    assert len(said.splitlines()) < 60
    assert re.search(r"and \d+ more; --json has all", said)
    assert "FAILED" in said


def test_a_promise_that_no_vector_kept_is_named(call: Call) -> None:
    with faulty("scores are shifted by one"):
        code, said, _ = call("--only", "hidden", columns=200)
    assert code == 1
    assert re.search(r"kept by no vector\s+score\s", said)


def test_one_document_has_all_of_it(call: Call) -> None:
    with faulty("commit=False commits"):
        code, said, _ = call("--only", "policy-1", "--json")
    found = json.loads(said)
    assert (code, found["passed"]) == (1, False)
    assert found["driver"]["name"] == "txl_runtime"
    (tally,) = found["bundles"]
    assert (tally["name"], tally["failed"]) == ("policy-1", len(tally["failures"]))
    assert all("commit" in failure["shows"] for failure in tally["failures"])


def test_a_promise_that_is_claimed_and_never_done_is_no_pass(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Driver.answer

    def declining(self: Driver, request: dict[str, Any]) -> Any:
        later = {"refused": "not yet", "kind": "unsupported"}
        return later if request["do"] in ("run", "feed") else answer(self, request)

    monkeypatch.setattr(Driver, "answer", declining)
    code, said, _ = call("--only", "policy-1", columns=200)
    assert code == 1
    assert re.search(r"claimed, but never done\s+commit, .*snapshot", said)
    assert re.search(r"verdict\s+FAILED", said)
    assert "selftest" not in said.partition("never done")[2]


def test_a_promise_that_is_none_is_named(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txl_deploy.conformance.driver.PROMISES", ["initial", "pading"])
    code, said, _ = call("--only", "policy-1")
    assert code == 0
    assert re.search(r"unknown promises\s+pading\s", said)


def test_nothing_that_was_run_is_no_pass(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txl_deploy.conformance.driver.PROMISES", [])
    code, said, _ = call("--only", "policy-1")
    assert code == 1
    assert re.search(rf"not supported\s+{VECTORS}\b", said)
    assert "nothing was run" in said


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--only", "rings"], "--only is 'rings', expected one of ring, .*; did you mean 'ring'"),
        (["--driver", ""], "--driver is empty, expected a command"),
        (["--driver", "'"], '--driver is "\'": No closing quotation'),
        (["--silence", "0"], "--silence is 0, expected seconds"),
    ],
)
def test_wrong_use_is_told(arguments: list[str], told: str, call: Call) -> None:
    code, _, beside = call(*arguments)
    assert code == 2
    assert re.search(told, beside)


@pytest.mark.skipif(sys.platform != "linux", reason="terminals are made as Linux makes them")
@pytest.mark.parametrize("columns", [80, pytest.param(40, marks=pytest.mark.slow)])
def test_ctrl_c_ends_the_driver_too(columns: int, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    line = [*COMMAND, "conformance", "--only", "ring", "--driver", shlex.join([*WRONG, "hangs", str(note)])]
    left = in_a_terminal(line, columns, BAR, CTRL_C, folder=FOLDER.parent)
    assert (left.code, left.lines[-2:]) == (130, ["error: interrupted", ""])
    assert not left.torn
    until(lambda: not (Path("/proc") / note.read_text()).exists())


@pytest.mark.skipif(sys.platform != "linux", reason="terminals are made as Linux makes them")
@pytest.mark.parametrize("columns", [80, 40])
def test_a_terminal_shows_the_whole_table_whatever_its_width(columns: int) -> None:
    left = in_a_terminal(
        [*COMMAND, "conformance", "--only", "lockstep", "--only", "policy-1"], columns, folder=FOLDER.parent
    )
    assert left.code == 0
    assert not left.torn
    text = "\n".join(left.lines)
    assert "not supported" in text
    assert text.count("0.0001") == 2
    assert all(len(line) <= columns for line in left.lines)
