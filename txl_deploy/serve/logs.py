"""Log the server's events, as lines for people or as JSON objects. Texts and names from clients are never logged."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import IO

import msgspec

from txl_deploy.console import plain


class Log:
    """A writer of events to standard error, and of the ready line to standard output.

    Args:
        as_json: True for one JSON object per event, including requests and checkpoints; False for lines for people,
            without frequent events.
    """

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def say(self, event: str, line: str, **facts: object) -> None:
        """Log a rare event: `line` for people, or `facts` as JSON."""
        self._write(sys.stderr, event, line, facts)

    def ready(self, line: str, **facts: object) -> None:
        """Report that the server listens: the only line on standard output, for the program or user that started it."""
        self._write(sys.stdout, "ready", line, facts)

    def detail(self, event: str, **facts: object) -> None:
        """Log a frequent event, such as a request, in JSON mode only."""
        if self._as_json:
            self._write(sys.stderr, event, "", facts)

    def _write(self, stream: IO[str], event: str, line: str, facts: dict[str, object]) -> None:
        if self._as_json:
            text = msgspec.json.encode({"time": round(time.time(), 3), "event": event, **facts}).decode()
        else:
            text = line
        with contextlib.suppress(OSError, ValueError):  # requests are answered even if nobody reads the log
            stream.write(f"{plain(text)}\n")
            stream.flush()
