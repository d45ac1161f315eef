"""A foreign graph, run in a helper process that may die, within bounds of memory and of processor time."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import onnx_ir as ir
from txl_runtime.errors import printable
from txl_runtime.sandbox.process import Bounded, Bounds, EndedError

from txl_export.families.graph.take import worker
from txl_export.families.graph.take.reading import Foreign, packed, parse
from txl_export.families.graph.take.worker import Answer, Request

SECONDS = 30.0
"""Of processor time that all runs of a file may take together, and as many that what is done between them may take."""
CLOCK = 20
"""Times as many seconds may pass by the clock: on a machine that does much else a process waits."""
MEMORY, EACH = 2**31, 8
"""Bytes that the helper may take: MEMORY, and EACH for each byte of the file and its weights."""


class RunError(Exception):
    """ONNX Runtime refused the graph or a run of it; the message is what it said."""


class Helper:
    """The process that a file's graphs are folded and run in. It ends with the `with`, with `close`, or when nobody has
    this or a `Runner` of it any more.

    Args:
        seconds: of processor time that all requests may take together; this thread may take as many meanwhile.

    Attributes:
        memory: bytes that the process may take.
        runs: number of runs of graphs that were asked for.
    """

    def __init__(self, foreign: Foreign, seconds: float = SECONDS) -> None:
        self.memory, self.runs = MEMORY + EACH * foreign.bytes, 0
        self._path, self._seconds, self._used, self._began = foreign.path, seconds, 0.0, time.thread_time()
        self._folder = str(foreign.path.parent.absolute()) if foreign.bytes > len(foreign.data) else ""
        bounds = Bounds(self.memory, max(1, math.ceil(seconds)))
        self._process = Bounded(worker.__file__, bounds, most=2 * worker.MOST_ANSWER + EACH * foreign.bytes)

    def __enter__(self) -> Helper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._process.close()

    @property
    def left(self) -> float:
        """Seconds of processor time that are left."""
        return self._seconds - max(self._used, time.thread_time() - self._began)

    def check(self) -> None:
        """Go on while there is time left.

        Raises:
            EndedError: there is none.
        """
        if self.left <= 0:
            raise EndedError(f"took more than {self._seconds:.0f} s of processor time")

    def open(self, graph: ir.Model | bytes) -> Runner:
        """A graph of the file, or the file's own bytes, to be run.

        Raises:
            CheckpointError: its parts do not fit together.
            RunError: ONNX Runtime does not open it.
            EndedError: the helper died of it, or its time is over.
        """
        data = graph if isinstance(graph, bytes) else packed(graph)
        return Runner(self, self.ask(Request(graph=data, folder=self._folder)).session)

    def fold(self, graph: ir.Model) -> ir.Model:
        """The graph with everything computed that is always the same; its opset is 18 or newer.

        Raises:
            CheckpointError: its parts do not fit together.
            RunError: it cannot be opened, or not converted.
            EndedError: the helper died of it, or its time is over.
        """
        with tempfile.TemporaryDirectory(prefix="txl-deploy-fold-") as place:  # ONNX Runtime writes files alone
            asked = Request(graph=packed(graph), folder=self._folder, place=place)
            return parse(self.ask(asked).graph, self._path)[0]

    def ask(self, request: Request) -> Answer:
        """What the process answers.

        Raises:
            RunError, EndedError: see `Runner.run`.
        """
        self.check()
        try:
            found = self._process.ask(msgspec.msgpack.encode(request), CLOCK * self.left)
            answer = msgspec.msgpack.decode(found, type=Answer)
        except (EndedError, msgspec.DecodeError) as error:
            raise EndedError(f"ONNX Runtime's process {error}") from None
        self._used = answer.seconds
        if answer.error:
            raise RunError(printable(answer.error))
        return answer


class Runner:
    """A graph that is open in a helper."""

    def __init__(self, helper: Helper, session: int) -> None:
        self._helper, self._session = helper, session

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._helper.ask(Request(session=self._session))

    @property
    def left(self) -> float:
        """See `Helper`."""
        return self._helper.left

    def check(self) -> None:
        """See `Helper`."""
        self._helper.check()

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Outputs by name for inputs by name; what is no array of numbers is left out.

        Raises:
            RunError: ONNX Runtime refuses them.
            EndedError: the helper died, or its time is over.
        """
        self._helper.runs += 1
        try:
            answer = self._helper.ask(Request(session=self._session, feeds=worker.packed(feeds)))
            return worker.unpacked(answer.outputs)
        except (ValueError, TypeError) as error:
            raise RunError(f"outputs that are no plain arrays: {error}") from None
