"""Runs an ONNX graph in a helper process that may die, with limits of memory and processor time."""

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
"""Seconds of processor time for all runs of a file, and the same again for this process between the runs."""
CLOCK = 20
"""Factor from processor time to the limit of wall-clock time, because a process waits on a busy machine."""
MEMORY, EACH = 2**31, 8
"""Limit of the helper's memory in bytes: `MEMORY`, plus `EACH` for each byte of the file and its weights."""


class RunError(Exception):
    """ONNX Runtime refused to open or run a graph; the message is ONNX Runtime's."""


class Helper:
    """The process that folds and runs a file's graphs.

    The process ends with the `with` block, with `close`, or when this object and its `Runner`s are garbage.

    Args:
        foreign: the file.
        seconds: processor time for all requests together; this thread may take the same between them.

    Attributes:
        memory: limit of the process's memory in bytes.
        runs: the number of runs so far.
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
    def seconds_left(self) -> float:
        """Seconds of processor time that are left to the process or to this thread, whichever has less."""
        return self._seconds - max(self._used, time.thread_time() - self._began)

    def check(self) -> None:
        """Raise an error if no time is left.

        Raises:
            EndedError: no time is left.
        """
        if self.seconds_left <= 0:
            raise EndedError(f"took more than {self._seconds:.0f} s of processor time")

    def open(self, graph: ir.Model | bytes) -> Runner:
        """Open a graph made from the file, or the file's own bytes, for runs.

        Raises:
            CheckpointError: the graph's parts do not fit together.
            RunError: ONNX Runtime does not open the graph.
            EndedError: the helper process died or ran out of time.
        """
        data = graph if isinstance(graph, bytes) else packed(graph)
        return Runner(self, self.ask(Request(graph=data, folder=self._folder)).session)

    def fold(self, graph: ir.Model) -> ir.Model:
        """Return the graph with all constants computed, in opset 18 or newer.

        Raises:
            CheckpointError: the graph's parts do not fit together.
            RunError: the graph cannot be opened or converted.
            EndedError: the helper process died or ran out of time.
        """
        # ONNX Runtime writes a folded graph only to a file
        with tempfile.TemporaryDirectory(prefix="txl-deploy-fold-") as place:
            asked = Request(graph=packed(graph), folder=self._folder, place=place)
            return parse(self.ask(asked).graph, self._path)[0]

    def ask(self, request: Request) -> Answer:
        """Send a request to the process; return its answer.

        Raises:
            RunError, EndedError: see `Runner.run`.
        """
        self.check()
        try:
            reply = self._process.ask(msgspec.msgpack.encode(request), CLOCK * self.seconds_left)
            answer = msgspec.msgpack.decode(reply, type=Answer)
        except (EndedError, msgspec.DecodeError) as error:
            raise EndedError(f"ONNX Runtime's process {error}") from None
        self._used = answer.seconds
        if answer.error:
            raise RunError(printable(answer.error))
        return answer


class Runner:
    """A graph that a helper has open."""

    def __init__(self, helper: Helper, session: int) -> None:
        self._helper, self._session = helper, session

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._helper.ask(Request(session=self._session))

    @property
    def seconds_left(self) -> float:
        """Seconds of processor time that are left; see `Helper`."""
        return self._helper.seconds_left

    def check(self) -> None:
        """Raise EndedError if no time is left; see `Helper`."""
        self._helper.check()

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return outputs by name for inputs by name; outputs that are no arrays of numbers are left out.

        Raises:
            RunError: ONNX Runtime refuses the inputs.
            EndedError: the helper process died or ran out of time.
        """
        self._helper.runs += 1
        try:
            answer = self._helper.ask(Request(session=self._session, feeds=worker.packed(feeds)))
            return worker.unpacked(answer.outputs)
        except (ValueError, TypeError) as error:
            raise RunError(f"outputs that are no plain arrays: {error}") from None
