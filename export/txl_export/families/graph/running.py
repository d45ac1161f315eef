"""A foreign graph, run in a helper process that may die, within bounds of time and memory."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
from txl_runtime.errors import UsageError, printable
from txl_runtime.starting import APART, environment, signal_of

from txl_export.families.graph import worker
from txl_export.families.graph.reading import Foreign
from txl_export.families.graph.worker import Answer, Request

SECONDS = 30.0
"""That everything which is run of a file may take together."""
MEMORY, EACH = 2**31, 4
"""Bytes that the helper may take: MEMORY, and EACH for each byte of the file and its weights."""


class EndedError(Exception):
    """The helper takes no further run: it died, or its time is over; the message says which."""


class RunError(Exception):
    """ONNX Runtime refused the graph or a run of it; the message is what it said."""


class Runner:
    """A graph that can be run, once it is entered; the helper ends with the `with`, or when nobody has this any more.

    Attributes:
        memory: bytes that the helper may take.
        runs: that were asked for.
    """

    def __init__(self, foreign: Foreign, seconds: float = SECONDS) -> None:
        if sys.platform == "win32":  # whose pipes are handed over in another way; nobody has tried it there
            raise UsageError("a foreign graph is run in a helper process, expected Linux or macOS for it; use WSL")
        self.memory, self.runs = MEMORY + EACH * foreign.bytes, 0
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
        self._end = weakref.finalize(self, _end, self._process, self._connection)

    def __enter__(self) -> Runner:
        """Open the graph.

        Raises:
            RunError: ONNX Runtime does not open it.
            EndedError: the helper died of it.
        """
        try:
            self._answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

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
        try:
            return worker.unpacked(self._asked(Request(worker.packed(feeds))).outputs)
        except (ValueError, EOFError) as error:
            raise RunError(f"outputs that are no plain arrays: {error}") from None

    def fold(self, graph: Path, place: Path) -> Path:
        """Compute what is always the same in a graph, whose opset is then 18 or newer.

        Args:
            graph: its file, with its weights beside it.
            place: a folder for what is written.

        Returns:
            The folded graph's file, with its weights beside it.

        Raises:
            RunError: it cannot be read or opened, or not converted.
            EndedError: as `run`.
        """
        self._asked(Request(graph=str(graph.absolute()), place=str(place.absolute())))
        return place / worker.FOLDED

    def _asked(self, request: Request) -> Answer:
        self.check()
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(request))
        except OSError:
            raise self._died() from None
        return self._answer()

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


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    process.kill()
    process.wait()
    connection.close()
