"""The runtime in JavaScript held to the conformance list, in Node."""

from __future__ import annotations

import json
import subprocess
import sys

from scripting import ROOT, driver


def test_it_keeps_every_promise_but_that_to_strangers_with_python_s_numbers() -> None:
    command = [sys.executable, "conformance/run.py", "--json", "--driver", " ".join(driver())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    *vectors, bad = found["bundles"]
    assert [failure for tally in found["bundles"] for failure in tally["failures"]] == []
    assert sum(tally["passed"] for tally in vectors) >= 395
    assert sum(tally["unsupported"] for tally in vectors) == 1  # lower case beyond ASCII
    assert max(tally["largest"] for tally in vectors) <= 1e-5
    assert bad["passed"] >= 130
    assert bad["died"] == 0
