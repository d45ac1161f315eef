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
from txl_deploy.terminal import has_room


class Log:
    """Writes events to standard error, and to standard output where a server listens.

    Whoever reads standard error may have stopped reading. A line that would have to wait for room in the pipe is left
    out, and how many there were is said once there is room again: requests are answered all the same.

    Args:
        as_json: every line is a JSON object, requests and checkpoints among them; else people read the lines, and what
            happens often is left out.
    """

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._left_out = 0

    def say(self, event: str, line: str, **facts: object) -> None:
        """Something that happens rarely."""
        self._tell(event, line, facts)

    def ready(self, line: str, **facts: object) -> None:
        """The server listens: the one line on standard output, for whoever started it."""
        self._write(sys.stdout, "ready", line, facts)

    def detail(self, event: str, **facts: object) -> None:
        """Something that happens often, such as a request: people are not told."""
        if self._as_json:
            self._tell(event, "", facts)

    def _tell(self, event: str, line: str, facts: dict[str, object]) -> None:
        if not has_room(sys.stderr):
            self._left_out += 1
            return
        if self._left_out:
            note = f"note: {self._left_out} lines were left out here, because standard error was not read"
            self._write(sys.stderr, "lines_left_out", note, {"lines": self._left_out})
            self._left_out = 0
        self._write(sys.stderr, event, line, facts)

    def _write(self, stream: IO[str], event: str, line: str, facts: dict[str, object]) -> None:
        if self._as_json:
            text = msgspec.json.encode({"time": round(time.time(), 3), "event": event, **facts}).decode()
        else:
            text = line
        with contextlib.suppress(OSError, ValueError):  # nobody reads: requests are answered all the same
            stream.write(f"{plain(text)}\n")
            stream.flush()
