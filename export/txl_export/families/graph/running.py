"""A foreign graph, run in a helper process that may die, within bounds of time and memory."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from txl_runtime.errors import UsageError, printable
from txl_runtime.starting import APART, environment, signal_of

from txl_export.families.graph import worker
from txl_export.families.graph.reading import Foreign
from txl_export.families.graph.worker import Answer

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
        if sys.platform == "win32":  # whose pipes are handed over in another way; nobody has tried it there
            raise UsageError("a foreign graph is run in a helper process, expected Linux or macOS for it; use WSL")
        self.memory, self.folded, self.runs = MEMORY + EACH * foreign.bytes, b"", 0
        self._seconds, self._until = seconds, time.monotonic() + seconds
        self._connection, theirs = multiprocessing.Pipe()
        told = [theirs.fileno(), foreign.path.absolute(), self.memory, int(seconds) + 5]
        nothing = subprocess.DEVNULL  # what native code prints is no answer, and nobody's to read
        self._process = subprocess.Popen(  # noqa: S603 - this Python, this package
            [sys.executable, "-m", worker.__name__, *map(str, told)],
            stdin=nothing,
            stdout=nothing,
            stderr=nothing,
            pass_fds=[theirs.fileno()],
            env=environment(),
            cwd=APART,
        )
        theirs.close()

    def __enter__(self) -> Runner:
        """Open the graph.

        Raises:
            RunError: ONNX Runtime does not open it.
            EndedError: the helper died of it.
        """
        try:
            self.folded = self._answer().folded
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()

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
        self.check()
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(worker.packed(feeds)))
        except OSError:
            raise self._died() from None
        try:
            return worker.unpacked(self._answer().outputs)
        except (ValueError, EOFError) as error:
            raise RunError(f"outputs that are no plain arrays: {error}") from None

    def _answer(self) -> Answer:
        self.check()
        try:
            if not self._connection.poll(self.left):
                raise self._late()
            answer = msgspec.msgpack.decode(self._connection.recv_bytes(2 * worker.MOST_ANSWER), type=Answer)
        except (EOFError, OSError, msgspec.DecodeError):
            raise self._died() from None
        if answer.error:
            raise RunError(printable(answer.error))
        return answer

    def _late(self) -> EndedError:
        return EndedError(f"took more than {self._seconds:.0f} s")

    def _died(self) -> EndedError:
        self._process.kill()
        code = self._process.wait()
        return EndedError(f"ONNX Runtime's process died of it ({signal_of(code) or f'exit code {code}'})")
