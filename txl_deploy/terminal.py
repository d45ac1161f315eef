"""What surrounds a run: standard streams that are full or gone, and a terminal of an odd width.

No package beside the standard library's is imported here, because the rest of the command line may be missing.
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
"""Columns that anything is laid out for: fewer would cut names to nothing, more only cost memory."""
_SIZE = re.compile("0*[1-9][0-9]{0,10}")
"""What a variable may say of a terminal; 0 says that it is not known."""


def settle() -> None:
    """Let the standard streams take every letter, and make the width of the terminal one that text fits into."""
    if sys.stdout is None or sys.stderr is None:
        os._exit(2)  # they were closed by who started this, so nobody can be told
    Messages.stream = sys.stderr
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # letters that the terminal's encoding lacks
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):
        if not _SIZE.fullmatch(os.environ.get(name, "1")):
            del os.environ[name]
    with contextlib.suppress(OSError, ValueError):
        width = int(os.environ.get("COLUMNS") or os.get_terminal_size(sys.stdout.fileno()).columns)
        if width and not LEAST <= width <= MOST:
            os.environ["COLUMNS"] = str(min(max(width, LEAST), MOST))


def leave() -> None:
    """Write what is left; a stream that takes nothing more gets a place that does, or Python would complain at exit."""
    for stream in (sys.stdout, sys.stderr):
        with lossy(stream):
            stream.flush()


def silence(stream: IO[str]) -> None:
    """Let everything that is still written to a stream go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def lossy(stream: IO[str]) -> Iterator[None]:
    """What is written in here may get lost; once something is, so is all that follows."""
    try:
        yield
    except (OSError, ValueError):
        silence(stream)


class Messages:
    """Standard error for messages: where they cannot be written any more, the work goes on without them.

    They go to the stream that the run began with. What rich puts in the place of sys.stderr while it draws a bar prints
    on the bar's console, and so ends here again.
    """

    stream = sys.stderr

    def write(self, text: str) -> int:
        """Write what can be written."""
        with lossy(self.stream):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Send it off."""
        with lossy(self.stream):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
