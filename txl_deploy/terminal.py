"""Prepare a run for standard streams that are full or closed, and for a terminal of an unusual width.

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
"""Smallest and largest width in columns for which output is laid out: less would cut names, more only takes memory."""
_SIZE = re.compile("0*[1-9][0-9]{0,10}")
"""Pattern of a terminal's size in an environment variable; other values, such as 0 for an unknown size, are removed."""


def settle() -> None:
    """Make the standard streams accept every character, and limit the terminal's width to `LEAST` … `MOST` columns."""
    if sys.stdout is None or sys.stderr is None:
        os._exit(2)  # the parent process closed them, so no message can be shown
    Messages.stream = sys.stderr
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # characters that the terminal's encoding lacks are escaped
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):
        if not _SIZE.fullmatch(os.environ.get(name, "1")):
            del os.environ[name]
    with contextlib.suppress(OSError, ValueError):
        width = int(os.environ.get("COLUMNS") or os.get_terminal_size(sys.stdout.fileno()).columns)
        if width and not LEAST <= width <= MOST:
            os.environ["COLUMNS"] = str(min(max(width, LEAST), MOST))


def leave() -> None:
    """Flush the streams; replace a stream that accepts no more output, because Python would complain at exit."""
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
    """Ignore failed writes in the `with` block; after the first, the stream is redirected to the null device."""
    try:
        yield
    except (OSError, ValueError):
        silence(stream)


class Messages:
    """Standard error for messages. If writing to it fails, messages are dropped and the work goes on.

    Messages go to the stream with which the run began. While rich draws a bar, it replaces sys.stderr by a stream that
    prints on the bar's console, and the console writes to this object.
    """

    stream = sys.stderr

    def write(self, text: str) -> int:
        """Write as much as the stream accepts."""
        with lossy(self.stream):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        with lossy(self.stream):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
