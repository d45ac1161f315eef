"""Python's driver: what it says to requests that are none, and what it needs to run."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from conformance.run import FOLDER

ALONE = """
import sys
from conformance.driver import main
main()
print(*sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def answered(lines: str, *words: str) -> tuple[list[dict[str, Any]], str]:
    """Run Python with these words and lines; returns its replies, and its standard error."""
    command = [sys.executable, *words]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=120, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_it_needs_the_runtime_alone() -> None:
    requests = [
        {"id": 1, "do": "load", "path": str(FOLDER / "bundles" / "ring"), "update": None},
        {"id": 2, "do": "open", "b": 1, "memory_length": None},
        {"id": 3, "do": "state"},
    ]
    replies, said = answered("".join(json.dumps(request) + "\n" for request in requests), "-c", ALONE)
    assert [reply["id"] for reply in replies] == [1, 2, 3]
    assert all("ok" in reply for reply in replies)
    assert not {"torch", "onnx", "typer", "rich", "txl_export", "txl_report"} & set(said.split())


def test_what_is_no_request_is_refused_in_one_line() -> None:
    lines = 'hello\n[]\n{"id": 7}\n{"id": 8, "do": "fly"}\n{"id": 9, "do": "load"}\n'
    replies, said = answered(lines, "-m", "conformance.driver")
    assert [reply["id"] for reply in replies] == [None, None, 7, 8, 9]
    assert all(reply["kind"] == "usage" and reply["refused"].isprintable() for reply in replies)
    assert replies[-1]["refused"].startswith("the request lacks 'update'")
    assert said == ""
