"""A process that may die: it answers requests within bounds of memory and time, over plain pipes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import IO

from msgspec import Struct

from txl_runtime.sandbox import child
from txl_runtime.starting import APART, environment, signal_of


class Bounds(Struct, frozen=True):
    """Limits of a bounded process.

    Attributes:
        memory: bytes beyond what the process holds before its first request; kept on Linux alone.
        processor_seconds: of one request, whole seconds; kept on Linux alone.
        seconds: by the clock, of one request.
    """

    memory: int
    processor_seconds: int = 30
    seconds: float = 300.0


class EndedError(Exception):
    """The process ended, and answers nothing more. The message is what it did, e.g. "took more than 300 s"."""


class Bounded:
    """A process with a function `answer` of some file of Python; threads take turns.

    It ends with the `with`, with `close`, when nobody holds this object any more, and with the process that made it.

    Args:
        program: the file. It may import installed packages, which are loaded before memory is counted.
        bounds: what each request may take.
        most: bytes of an answer.
    """

    def __init__(self, program: str | Path, bounds: Bounds, most: int = 2**28) -> None:
        self._bounds, self._most, self._ended = bounds, most, ""
        told = [Path(program).absolute(), bounds.memory, bounds.processor_seconds]
        self._process = subprocess.Popen(  # noqa: S603 - this Python, this package
            [sys.executable, str(Path(child.__file__).absolute()), *map(str, told)],
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
        """End the process; what it computes is lost."""
        self._ended = self._ended or "was closed"
        self._end()

    def ask(self, request: bytes, seconds: float | None = None) -> bytes:
        """The answer to a request.

        Args:
            request: what `answer` gets.
            seconds: by the clock; the bounds' without it.

        Raises:
            EndedError: the process died, took too long, or would answer with too much.
        """
        within = self._bounds.seconds if seconds is None else seconds
        with self._lock:
            if self._ended:
                raise EndedError(self._ended)
            timer = threading.Timer(within, self._late, (within,))  # a pipe of Windows cannot be waited for
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
            except BaseException:  # an interrupt, after which the next answer would be this request's
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
        self._process.kill()  # where it closed its pipe and lives on
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
        with contextlib.suppress(OSError):  # of a request that was not read
            pipe.close()
