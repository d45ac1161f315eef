"""The sample reader, which was written from the format's page alone, passes the list as its driver is asked it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from typing import Any

import pytest

from conformance.run import FOLDER, main

pytestmark = pytest.mark.slow(keep=9)

REPOSITORY = FOLDER.parent
DRIVER = shlex.join([sys.executable, str(REPOSITORY / "samples/reader/driver.py")])


@pytest.fixture
def ask(capfd):
    def ask(*options: str) -> dict[str, Any]:
        code = main(["--driver", DRIVER, "--json", *options])
        found = json.loads(capfd.readouterr().out)
        assert code == 0, found
        return {tally["name"]: tally for tally in found["bundles"]}

    return ask


def test_ring_rolled_and_replaced_states_are_equal_to_the_bit(ask):
    for tally in ask("--only", "ring", "--only", "hidden", "--only", "lookahead").values():
        assert tally["passed"] == tally["vectors"] > 0
        assert tally["same_bits"]


def test_it_replays_the_vectors_of_a_bundle():
    words = [sys.executable, "samples/reader/words.py", "samples/tiny.txl", "conformance/bundles/policy-16"]
    said = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=300).stdout
    assert [line.split()[1:3] for line in said.splitlines()] == [
        ["ring", "passes"],
        ["rolled", "passes"],
        ["replace", "passes"],
    ]


@pytest.mark.slow
def test_all_of_the_list_that_it_supports_is_kept(ask):
    found = ask()
    bad = found.pop("bad_bundles")
    assert (bad["failed"], bad["opened"], bad["died"]) == (0, 0, 0)
    assert bad["refused"] > 100
    assert found.pop("axes")["passed"] == 0, "the reader says that it does not support other axes"
    for name, tally in found.items():
        assert tally["passed"] == tally["vectors"]
        assert tally["same_bits"] or name == "half"
