"""Python's driver: what it says to requests that are none, and what it needs to run."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from conformance.driver import Driver, packed
from conformance.run import FOLDER

ALONE = """
import sys
from conformance.driver import main
main()
print(*sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def test_it_needs_the_runtime_alone() -> None:
    requests = [
        {"id": 1, "do": "load", "path": str(FOLDER / "bundles" / "ring"), "update": None},
        {"id": 2, "do": "open", "b": 1, "memory_length": None},
        {"id": 3, "do": "state"},
    ]
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run(
        [sys.executable, "-c", ALONE], input=lines, capture_output=True, text=True, timeout=120, check=True
    )
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert [reply["id"] for reply in replies] == [1, 2, 3]
    assert all("ok" in reply for reply in replies)
    assert not {"torch", "onnx", "typer", "rich", "txl_export", "txl_report"} & set(done.stderr.split())


def test_what_is_no_request_is_refused_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "conformance.driver"],
        input='hello\n[]\n{"id": 7}\n{"id": 8, "do": "fly"}\n{"id": 9, "do": "load"}\n',
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert [reply["id"] for reply in replies] == [None, None, 7, 8, 9]
    assert all(reply["kind"] == "usage" and reply["refused"].isprintable() for reply in replies)
    assert replies[-1]["refused"].startswith("the request lacks 'update'")
    assert done.stderr == ""


REQUESTS: dict[str, dict[str, Any]] = {
    "load": {"path": "x", "update": None},
    "open": {"b": 1, "memory_length": None},
    "run": {"inputs": {"tokens": packed(np.zeros((1, 1), np.int32))}, "counts": None, "commit": True},
    "feed": {"inputs": {"tokens": packed(np.zeros((1, 1), np.int32))}, "counts": None, "last": False},
    "score": {"tokens": packed(np.zeros((1, 2), np.int32)), "counts": None},
    "generate": {
        "tokens": packed(np.zeros((1, 2), np.int32)),
        "counts": None,
        "count": 2,
        "temperature": 1.0,
        "top_k": None,
        "top_p": None,
        "seed": 0,
    },
    "reset": {"rows": None},
    "select": {"rows": [0]},
    "restore": {"bytes": ""},
    "take": {"row": 0},
    "put": {"row": 0, "bytes": ""},
    "encode": {"bytes": ""},
    "decode": {"tokens": packed(np.zeros(1, np.int32))},
}
JUNK = [None, 3, -1, 0, 1e300, "x", "", [], {}, [[1]], ["a"], True, {"tokens": 1}, 1 << 70]


@pytest.mark.parametrize("does", REQUESTS)
def test_whatever_stands_in_a_request_it_is_answered_or_refused(does: str) -> None:
    driver = Driver()
    driver.answer({"do": "load", "path": str(FOLDER / "bundles" / "hidden"), "update": None})
    driver.answer({"do": "open", "b": 1, "memory_length": None})
    refused = 0
    for name in REQUESTS[does]:
        for junk in JUNK:
            if name == "count" and junk == 1 << 70:  # the runner's patience ends that
                continue
            reply = driver.answer({"do": does, **REQUESTS[does], name: junk})
            refused += "refused" in reply
            assert reply.get("kind") in (None, "usage", "bundle"), (name, junk, reply)
            if does == "load":
                driver.answer({"do": "load", "path": str(FOLDER / "bundles" / "hidden"), "update": None})
            driver.answer({"do": "open", "b": 1, "memory_length": None})
    assert refused > len(JUNK) / 2
