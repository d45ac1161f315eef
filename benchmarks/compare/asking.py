"""A process of another checkout that answers questions, so that two checkouts can be timed in turns."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bit_equality import environment_of

Ask = Callable[[dict[str, Any]], dict[str, float]]
"""Sends a request and waits for its answer."""


@contextmanager
def asked(command: Sequence[str], source: Path, title: str) -> Iterator[Ask]:
    """Start a process that reads one request per line and answers each with one line, both JSON.

    Args:
        command: the command that starts it; the process ends when its input ends.
        source: the checkout whose packages it imports.
        title: its name in the error if it ends early, as in "the process TITLE ended".
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
