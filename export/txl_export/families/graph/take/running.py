"""A foreign graph, run in a helper process that may die, within bounds of time and memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from txl_runtime.errors import printable
from txl_runtime.sandbox.process import Bounded, Bounds, EndedError

from txl_export.families.graph.take import worker
from txl_export.families.graph.take.reading import Foreign
from txl_export.families.graph.take.worker import Answer, Request

SECONDS = 30.0
"""That everything which is run of a file may take together."""
MEMORY, EACH = 2**31, 4
"""Bytes that the helper may take: MEMORY, and EACH for each byte of the file and its weights."""


class RunError(Exception):
    """ONNX Runtime refused the graph or a run of it; the message is what it said."""


class Runner:
    """A graph that can be run, once it is entered; the helper ends with the `with`, or when nobody has this any more.

    Attributes:
        memory: bytes that the helper may take.
        runs: that were asked for.
    """

    def __init__(self, foreign: Foreign, seconds: float = SECONDS) -> None:
        self.memory, self.runs = MEMORY + EACH * foreign.bytes, 0
        self._path, self._seconds, self._until = foreign.path, seconds, time.monotonic() + seconds
        bounds = Bounds(self.memory, int(seconds) + 5)
        self._process = Bounded(worker.__file__, bounds, most=2 * worker.MOST_ANSWER)

    def __enter__(self) -> Runner:
        """Open the graph.

        Raises:
            RunError: ONNX Runtime does not open it.
            EndedError: the helper died of it.
        """
        try:
            self._asked(Request(opened=str(self._path.absolute())))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()

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
            raise EndedError(f"took more than {self._seconds:.0f} s")

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Outputs by name for inputs by name; what is no array of numbers is left out.

        Raises:
            RunError: ONNX Runtime refuses them.
            EndedError: the helper died, or its time is over.
        """
        self.runs += 1
        try:
            return worker.unpacked(self._asked(Request(feeds=worker.packed(feeds))).outputs)
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
            found = self._process.ask(msgspec.msgpack.encode(request), self.left)
            answer = msgspec.msgpack.decode(found, type=Answer)
        except (EndedError, msgspec.DecodeError) as error:
            self.check()
            raise EndedError(f"ONNX Runtime's process {error}") from None
        if answer.error:
            raise RunError(printable(answer.error))
        return answer
