"""What surrounds a run: standard streams that are closed, full or gone, and a terminal of an odd width.

No package beside the standard library's is imported here, because the rest of the command line may be missing.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, TextIO

LEAST, MOST = 20, 1000
"""Columns that anything is laid out for: fewer would cut names to nothing, more only cost memory."""
_MODES = {"stdin": ("r", os.O_RDONLY), "stdout": ("w", os.O_RDONLY), "stderr": ("w", os.O_WRONLY)}
"""What takes the place of a stream that is closed. Messages may get lost, results may not: writing them fails."""


def settle() -> None:
    """Make every standard stream one that can be used, and the width of the terminal one that text fits into.

    The descriptor of a closed stream is taken, so that no file of a bundle is opened under its number and written to by
    a library that says something.
    """
    for number, (name, (mode, flags)) in enumerate(_MODES.items()):
        if getattr(sys, name) is None:
            found = os.open(os.devnull, flags)
            if found != number:
                os.dup2(found, number)
                os.close(found)
            setattr(sys, name, io.open(number, mode, encoding="utf-8", closefd=False))  # noqa: UP020, SIM115
    Messages.stream = sys.stderr
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # letters that the terminal's encoding lacks
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):
        if name in os.environ and not _is_size(os.environ[name]):
            del os.environ[name]
    with contextlib.suppress(OSError, ValueError):
        width = int(os.environ.get("COLUMNS") or os.get_terminal_size(sys.stdout.fileno()).columns)
        if width and not LEAST <= width <= MOST:
            os.environ["COLUMNS"] = str(min(max(width, LEAST), MOST))


def _is_size(text: str) -> bool:
    """Whether a variable is a size; 0 says that it is not known."""
    return text.isascii() and text.isdecimal() and len(text) < 12 and int(text) > 0


def leave() -> None:
    """Write what is left; a stream that takes nothing more gets a place that does, or Python would complain at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            silence(stream)


def silence(stream: TextIO) -> None:
    """Let everything that is still written to a stream go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class Messages:
    """Standard error for messages: where they cannot be written any more, the work goes on without them.

    They go to the stream that the run began with. What rich puts in the place of sys.stderr while it draws a bar prints
    on the bar's console, and so ends here again.
    """

    stream = sys.stderr

    def write(self, text: str) -> int:
        """Write what can be written."""
        try:
            return self.stream.write(text)
        except (OSError, ValueError):
            silence(self.stream)
            return len(text)

    def flush(self) -> None:
        """Send it off."""
        try:
            self.stream.flush()
        except (OSError, ValueError):
            silence(self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
