"""What a library says while it works: through its logger, and straight to stderr."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

__all__ = ["Journal", "captured_stderr", "interruptible"]

WARNING, ERROR = 2, 1
POLL_SECONDS = 0.05
T = TypeVar("T")


@dataclass
class Journal:
    """What was logged during one piece of work, as far as it matters: errors, warnings and the final list of layers."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    layers: str = ""
    stderr: str = ""

    def add(self, severity: int, text: str) -> None:
        """One message; severities count as TensorRT's, 0 is the worst."""
        if severity <= ERROR:
            self.errors.append(text)
        elif severity == WARNING:
            self.warnings.append(text)
        elif "LayerType:" in text and "Name:" in text:
            self.layers = text

    def text(self) -> str:
        """All that can tell why something failed, the logged before what only stderr was told."""
        return "\n".join([*self.errors, self.stderr]).strip()


@contextlib.contextmanager
def captured_stderr(journal: Journal) -> Iterator[None]:
    """Catch what native code writes to descriptor 2; Python's own stderr goes on to where it went.

    Some of TensorRT's compiler errors pass its logger by. On success the caught text is written after all, since it
    may be anyone's.
    """
    if not _stderr_is_descriptor_2():
        yield
        return
    python_stderr = sys.stderr
    python_stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as caught, open(  # noqa: PTH123 - a descriptor, not a path
        os.dup(kept), "w", encoding=python_stderr.encoding, errors="backslashreplace", buffering=1
    ) as outside:
        sys.stderr = outside
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            sys.stderr = python_stderr
            caught.seek(0)
            journal.stderr += caught.read().decode(errors="backslashreplace")


def _stderr_is_descriptor_2() -> bool:
    try:
        return sys.stderr.fileno() == 2
    except (AttributeError, OSError, ValueError):
        return False  # closed, or a test's; whoever replaced it sees to it


def interruptible(work: Callable[[], T], tick: Callable[[], None], cancel: Callable[[], None]) -> T:
    """Run native work in a thread of its own, so that Ctrl-C arrives: signals reach Python only between its own steps.

    `tick` is called here while it runs. When that raises, or a signal does, `cancel` is called, the work is waited
    for, and the exception goes on. A second interrupt does not end the wait: the library's memory is in use.
    """
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # carried to the caller's thread
            failures.append(error)

    thread = threading.Thread(target=run, name="engine builder", daemon=True)
    stopped: BaseException | None = None
    try:
        thread.start()
    except BaseException as error:
        stopped = error
        cancel()
    while thread.is_alive():
        try:
            thread.join(POLL_SECONDS)
            if stopped is None:
                tick()
        except BaseException as error:
            stopped = stopped or error
            cancel()
    if stopped is not None:
        raise stopped
    if failures:
        raise failures[0]
    return results[0]
