"""A process with limits of memory and time, which answers requests over pipes; if it crashes, its parent continues."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import IO

from msgspec import Struct

from txl_runtime.errors import UsageError, brief
from txl_runtime.sandbox import child
from txl_runtime.starting import APART, environment, signal_of


class Bounds(Struct, frozen=True):
    """Limits of a bounded process.

    Attributes:
        memory: bytes in addition to what the process uses before its first request; enforced only on Linux.
        processor_seconds: processor time of one request, in whole seconds; enforced only on Linux.
        seconds: wall-clock time of one request.

    Raises:
        UsageError: a limit is no positive number, or too large for the system.
    """

    memory: int
    processor_seconds: int = 30
    seconds: float = 300.0

    def __post_init__(self) -> None:
        for name, whole in (("memory", True), ("processor_seconds", True), ("seconds", False)):
            value, most = getattr(self, name), 2**53 if name == "memory" else 2**31
            fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if not fits or not 0 < value <= most:
                expected = f"a {'whole ' if whole else ''}number above 0, at most {most}"
                raise UsageError(f"bounds: {name} is {brief(repr(value))}, expected {expected}; give that")


class EndedError(Exception):
    """The process has ended and answers no more requests. The message says how it ended, e.g. "took more
    than 300 s".
    """


class Bounded:
    """A process that runs the function `answer` of a Python file. Threads of the caller take turns.

    The process ends with the `with` block, by `close`, with this object's garbage collection, and with its parent
    process.

    Args:
        program: path of the file. Packages that it imports are loaded before memory is counted.
        bounds: limits of each request.
        most: maximum number of bytes of an answer.
    """

    def __init__(self, program: str | Path, bounds: Bounds, most: int = 2**28) -> None:
        self._bounds, self._most, self._ended = bounds, most, ""
        arguments = [Path(program).absolute(), bounds.memory, bounds.processor_seconds]
        self._process = subprocess.Popen(  # noqa: S603 - this Python, this package
            [sys.executable, str(Path(child.__file__).absolute()), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(),
            cwd=APART,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _end, self._process, self._requests, self._answers)

    def __enter__(self) -> Bounded:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, even in the middle of a request."""
        self._ended = self._ended or "was closed"
        self._end()

    def ask(self, request: bytes, seconds: float | None = None) -> bytes:
        """Send a request and return the answer.

        Args:
            request: the argument for `answer`.
            seconds: wall-clock limit of this request; None for the limit in `bounds`.

        Raises:
            EndedError: the process died, took too long, or its answer is too long.
        """
        within = self._bounds.seconds if seconds is None else seconds
        with self._lock:
            if self._ended:
                raise EndedError(self._ended)
            timer = threading.Timer(within, self._late, (within,))  # on Windows, select does not accept pipes
            timer.daemon = True
            timer.start()
            try:
                child.write_frame(self._requests, request)
                return child.read_frame(self._answers, self._most)
            except (EOFError, OSError):
                raise EndedError(self._died()) from None
            except ValueError as size:
                self._ended = f"answered {size} bytes, expected at most {self._most}"
                raise EndedError(self._ended) from None
            except BaseException:  # after an interrupt, the next answer read would belong to this request
                self._ended = "was interrupted"
                raise
            finally:
                timer.cancel()
                if self._ended:
                    self._end()

    def _late(self, seconds: float) -> None:
        self._ended = f"took more than {seconds:.3g} s"
        self._process.kill()

    def _died(self) -> str:
        self._process.kill()  # the process may have closed its pipe without ending
        code = self._process.wait()
        if not self._ended:
            signal = signal_of(code)
            if signal == "SIGXCPU":
                self._ended = f"took more than {self._bounds.processor_seconds} s of processor time"
            elif code == child.NO_MEMORY:
                self._ended = f"needed more than {self._bounds.memory} bytes of memory"
            else:
                self._ended = f"died of {signal or f'exit code {code}'}"
        return self._ended


def _end(process: subprocess.Popen[bytes], *pipes: IO[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in pipes:
        with contextlib.suppress(OSError):  # close flushes a request that the ended process did not read
            pipe.close()
