"""Start a process that answers requests with the packages of a given checkout, so that two can be timed in turns."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bit_equality import environment_of

Ask = Callable[[dict[str, Any]], dict[str, float]]
"""A function that sends one request to the process, waits for the answer and returns it, e.g. {"seconds": 0.2}."""


@contextmanager
def asked(command: Sequence[str], source: Path, title: str) -> Iterator[Ask]:
    """Start a process that reads requests, one JSON document a line, and answers each with one line of JSON.

    Args:
        command: the command that starts the process; the process ends when its input ends.
        source: the checkout whose packages the process imports.
        title: the process's name in the error that is raised if it ends early: "the process TITLE ended …".
    """
    process = subprocess.Popen(
        command, env=environment_of(source), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    requests, answers = process.stdin, process.stdout

    def ask(request: dict[str, Any]) -> dict[str, float]:
        with suppress(BrokenPipeError):
            requests.write(json.dumps(request) + "\n")
            requests.flush()
        line = answers.readline()
        if not line:
            raise SystemExit(f"the process {title} ended with exit code {process.wait()}; its message is above")
        return dict(json.loads(line))

    try:
        yield ask
    finally:
        with suppress(BrokenPipeError):
            requests.close()
        answers.close()
        process.wait()
