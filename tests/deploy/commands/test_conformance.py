"""`txl-deploy conformance`, as a user types it: the table, what fails, exit codes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from conforming import FOLDER, inside
from stand_ins.wrong_drivers import faulty
from support import call_main

from txl_deploy import console

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
