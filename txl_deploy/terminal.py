"""Prepare the surroundings of a run: standard streams that are full or closed, and a terminal of an odd width.

Only the standard library is imported here, because the packages of the command line may be missing.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from typing import IO, Any

LEAST, MOST = 20, 1000
"""Columns that output is laid out for: fewer would cut names to nothing, more only cost memory."""
_SIZE = re.compile("0*[1-9][0-9]{0,10}")
"""Accepted values of a terminal's size in a variable; 0 would mean unknown."""


def settle() -> None:
    """Make the standard streams accept every character, and limit the terminal's width to one that text fits into."""
    if sys.stdout is None or sys.stderr is None:
        os._exit(2)  # the parent process closed them, so no message can be shown
    Messages.stream = sys.stderr
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # escapes characters that the terminal's encoding lacks
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):
        if not _SIZE.fullmatch(os.environ.get(name, "1")):
            del os.environ[name]
    with contextlib.suppress(OSError, ValueError):
        width = int(os.environ.get("COLUMNS") or os.get_terminal_size(sys.stdout.fileno()).columns)
        if width and not LEAST <= width <= MOST:
            os.environ["COLUMNS"] = str(min(max(width, LEAST), MOST))


def leave() -> None:
    """Flush the streams; one that takes nothing more is replaced, or Python would complain at exit."""
    for stream in (sys.stdout, sys.stderr):
        with lossy(stream):
            stream.flush()


def silence(stream: IO[str]) -> None:
    """Redirect a stream to the null device."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def lossy(stream: IO[str]) -> Iterator[None]:
    """Tolerate failed writes in the block; after the first, the stream is silent."""
    try:
        yield
    except (OSError, ValueError):
        silence(stream)


class Messages:
    """Standard error for messages: if they cannot be written any more, the work goes on without them.

    They go to the stream that the run began with. While rich draws a bar, it replaces sys.stderr by a stream that
    prints on the bar's console, and so ends here again.
    """

    stream = sys.stderr

    def write(self, text: str) -> int:
        """Write as much as the stream takes."""
        with lossy(self.stream):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        with lossy(self.stream):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
