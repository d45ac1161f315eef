"""A foreign graph, run in a helper process that may die, within bounds of time and memory."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import IO, Any, cast

import msgspec
from txl_runtime.errors import printable
from txl_runtime.starting import APART, environment, signal_of

from txl_export.families.graph import worker
from txl_export.families.graph.reading import Foreign
from txl_export.families.graph.worker import Answer, Open

SECONDS = 30.0
"""That everything which is run of a file may take together."""
MEMORY, EACH = 2**31, 4
"""Bytes that the helper may take: MEMORY, and EACH for each byte of the file and its weights."""


class EndedError(Exception):
    """The helper takes no further run: it died, or its time is over; the message says which."""


class RunError(Exception):
    """ONNX Runtime refused the graph or a run of it; the message is what it said."""


class Runner:
    """A graph that can be run; use it in a `with`, which ends the helper.

    Attributes:
        memory: bytes that the helper may take.
        folded: the graph with everything computed that is always the same; empty where it is too large.
        runs: that were asked for.
    """

    def __init__(self, foreign: Foreign, seconds: float = SECONDS) -> None:
        self.memory, self.folded, self.runs = MEMORY + EACH * foreign.bytes, b"", 0
        self._seconds, self._until = seconds, time.monotonic() + seconds
        self._process = subprocess.Popen(  # noqa: S603 - this Python, this package
            [sys.executable, "-m", worker.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            cwd=APART,
        )
        self._foreign, self._answers = foreign, queue.Queue[bytes]()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> Runner:
        """Open the graph.

        Raises:
            RunError: ONNX Runtime does not open it.
            EndedError: the helper died of it.
        """
        try:
            path = str(self._foreign.path.absolute())
            self.folded = self._ask(Open(path, self.memory, int(self._seconds) + 5)).folded
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._listener.join()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what it was to read is lost with it
                cast(IO[bytes], stream).close()

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._until - time.monotonic()

    def check(self) -> None:
        """Go on while there is time left.

        Raises:
            EndedError: there is none.
        """
        if self.left <= 0:
            raise self._late()

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Outputs by name for inputs by name; what is no array of numbers is left out.

        Raises:
            RunError: ONNX Runtime refuses them.
            EndedError: the helper died, or its time is over.
        """
        self.runs += 1
        answer = self._ask(worker.packed(dict(feeds)))
        try:
            return worker.unpacked(answer.outputs)
        except (ValueError, TypeError) as error:
            raise RunError(f"outputs that are no plain arrays: {error}") from None

    def _ask(self, message: Any) -> Answer:
        assert self._process.stdin is not None
        self.check()
        try:
            worker.send(self._process.stdin, message)
            data = self._answers.get(timeout=max(self.left, 0))
            answer = msgspec.msgpack.decode(data, type=Answer)
        except queue.Empty:
            raise self._late() from None
        except (OSError, msgspec.DecodeError):  # nothing is no message
            raise self._died() from None
        if answer.error:
            raise RunError(printable(answer.error))
        return answer

    def _listen(self) -> None:
        """Take answers until there are no more, in a thread: a pipe can be waited for with a limit like that alone."""
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # it was closed
            while data := worker.receive(self._process.stdout):
                self._answers.put(data)
        self._answers.put(b"")

    def _late(self) -> EndedError:
        return EndedError(f"took more than {self._seconds:.0f} s")

    def _died(self) -> EndedError:
        self._process.kill()
        code = self._process.wait()
        return EndedError(f"ONNX Runtime's process died of it ({signal_of(code) or f'exit code {code}'})")
