"""What the server says of itself: one line that a person reads, or one JSON object per event. Never a text or a name
that a client sent.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import IO

import msgspec

from txl_deploy.console import plain


class Log:
    """Writes events to standard error, and to standard output where a server listens.

    Args:
        as_json: every line is a JSON object, requests and checkpoints among them; else people read the lines, and what
            happens often is left out.
    """

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def say(self, event: str, line: str, **facts: object) -> None:
        """Something that happens rarely."""
        self._write(sys.stderr, event, line, facts)

    def ready(self, line: str, **facts: object) -> None:
        """The server listens: the one line on standard output, for whoever started it."""
        self._write(sys.stdout, "ready", line, facts)

    def detail(self, event: str, **facts: object) -> None:
        """Something that happens often, such as a request: people are not told."""
        if self._as_json:
            self._write(sys.stderr, event, "", facts)

    def _write(self, stream: IO[str], event: str, line: str, facts: dict[str, object]) -> None:
        if self._as_json:
            text = msgspec.json.encode({"time": round(time.time(), 3), "event": event, **facts}).decode()
        else:
            text = line
        with contextlib.suppress(OSError, ValueError):  # nobody reads: requests are answered all the same
            stream.write(f"{plain(text)}\n")
            stream.flush()
