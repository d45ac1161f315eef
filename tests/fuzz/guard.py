"""The limits of one input: a refusal in one printable line, in bounded time and memory. All else is a failure."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from txl_runtime.errors import TxlError

SECONDS = 3.0
"""Processor seconds of one input, of at most 64 KiB, in a process whose coverage is counted."""
GROWTH = 128 << 20
"""Bytes that one input may take at most, with what the process loads late."""
MESSAGE = 4000
"""Characters of a message."""


class TookTooLong(BaseException):
    """An input took longer than `SECONDS`; no handler for errors of input catches it."""


class Guard:
    """Runs inputs, and keeps the first of every kind of failure.

    Attributes:
        cases: inputs run so far.
        failures: by signature, what went wrong.
        refused: inputs that ended in a documented error.
    """

    def __init__(self, one_input: Callable[[bytes], None], crashes: Path | None = None) -> None:
        self._one_input, self._crashes = one_input, crashes
        self.cases = self.refused = 0
        self.failures: dict[str, str] = {}
        signal.signal(signal.SIGPROF, _interrupt)
        try:
            self._marks = os.open("/proc/self/clear_refs", os.O_WRONLY)
        except OSError:  # not Linux: only what goes beyond all inputs before is seen
            self._marks = -1

    def __del__(self) -> None:
        if self._marks >= 0:
            os.close(self._marks)

    def _largest(self, anew: bool = False) -> int:
        """The largest memory of the process so far, in bytes; `anew` counts from now on."""
        if anew and self._marks >= 0:
            os.write(self._marks, b"5")
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    def __call__(self, data: bytes) -> str | None:
        """Run one input; what went wrong, if anything."""
        self.cases += 1
        before = self._largest(anew=True)
        found: tuple[str, str] | None = None
        try:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                self._one_input(data)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        except TxlError as error:
            self.refused += 1
            if problem := message_problem(error):
                found = f"message: {problem} {place(error)}", f"{problem}: {error!r}"
        except (KeyboardInterrupt, SystemExit) as error:
            found = type(error).__name__, repr(error)
        except BaseException as error:
            found = f"{type(error).__name__} {place(error)}", "".join(traceback.format_exception(error))
        grown = self._largest() - before
        if found is None and grown > GROWTH:
            found = "memory", f"{grown >> 20} MiB more memory for {len(data)} bytes"
        if found is None:
            return None
        if found[0] not in self.failures:
            self.failures[found[0]] = found[1]
            if self._crashes is not None:
                self._crashes.mkdir(parents=True, exist_ok=True)
                (self._crashes / f"crash-{hashlib.sha256(data).hexdigest()[:16]}").write_bytes(data)
                print(f"FAILURE {found[0]}\n{found[1]}", file=sys.stderr, flush=True)
        return found[1]


def message_problem(error: TxlError) -> str | None:
    """Return the fault of an error's message, or None: it has to fit one line of a terminal or a log."""
    message = str(error)
    if not message:
        return "an empty message"
    if len(message) > MESSAGE:
        return "a message that is too long"
    if any(ord(character) < 32 or 127 <= ord(character) < 160 for character in message):
        return "a message with control characters"
    if any(0xD800 <= ord(character) < 0xE000 for character in message):
        return "a message that is no UTF-8"
    if "more memory than there is" in message:
        return "more memory than there is"
    return None


def place(error: BaseException) -> str:
    """Return the place at which an error was raised, by the last frames of the project."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/txl_" in frame.filename or "/fuzz/" in frame.filename] or list(frames)
    return " ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in ours[-1:])


def bound_memory(room: int = 1 << 30) -> None:
    """Let the process map `room` bytes more than it has: what would take gigabytes fails at once."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux
        return
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, resource.RLIM_INFINITY))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise TookTooLong(f"more than {SECONDS} s of processor time")
