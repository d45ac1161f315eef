"""CUDA graphs that ONNX Runtime records itself, one for each tie of a program to memory.

It runs a program twice, records the third run and replays that, all in the first call; from then on a call is one
launch. That is right for programs whose outputs do not change what they read, and for rings, whose rows come out the
same each time. Its documentation allows this in one thread of a session alone, and a graph stays until the session
goes.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from typing import Any

from txl_runtime.errors import BackendError, one_line

logger = logging.getLogger(__name__)

ENABLE, GRAPH_ID = "enable_cuda_graph", "gpu_graph_id"
NO_GRAPH = "-1"
"""In place of an id: the run is none that is recorded or replayed."""
WITHOUT_WAITING = "disable_synchronize_execution_providers"
FIRST_VERSION = (1, 31, 1)
"""Earlier ones may replay pointers from memory that something else has by then (onnxruntime's pull request 32121)."""
MOST_GRAPHS = 64
"""Graphs of a session: streams that come and go would have it keep ever more."""


def too_old(version: str) -> str:
    """Why an ONNX Runtime may not record, in words; empty where it may."""
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    first = ".".join(map(str, FIRST_VERSION))
    return "" if numbers >= FIRST_VERSION else f"onnxruntime is {version}, expected {first} or newer"


class Runs:
    """The runs of one program's session, which is `recording` where it was opened so."""

    def __init__(self, ort: Any, session: Any, name: str, recording: bool) -> None:
        self._ort, self._session, self._name, self._recording = ort, session, name, recording
        self._plain, self._ids, self._threads = self._options(NO_GRAPH), dict[tuple[int, ...], Any](), list[int]()

    def tie(self, binding: Any, addresses: tuple[int, ...]) -> Callable[[], None]:
        """A call that runs the program with a binding; what is at other addresses is another graph.

        The call raises BackendError where ONNX Runtime fails.
        """
        if self._recording and addresses not in self._ids and len(self._ids) < MOST_GRAPHS:
            self._ids[addresses] = self._options(str(len(self._ids) + 1))
        run, plain, recorded = self._session.run_with_iobinding, self._plain, self._ids.get(addresses)
        if self._recording and recorded is None:
            self._leave(f"this session has {MOST_GRAPHS} already, and keeps them until the model is closed")

        def launch() -> None:
            nonlocal recorded
            if recorded is not None and self._may_record():
                try:
                    run(binding, recorded)
                    return
                except Exception as error:  # ONNX Runtime raises its own kinds, one per status code
                    recorded = None
                    self._leave(one_line(error))
            try:
                run(binding, plain)
            except Exception as error:
                raise BackendError(f"program {self._name} failed in ONNX Runtime: {one_line(error)}") from None

        return launch

    def _options(self, graph: str) -> Any:
        options = self._ort.RunOptions()
        # The queue orders what comes before and after; who reads results waits for their place in it.
        options.add_run_config_entry(WITHOUT_WAITING, "1")
        if self._recording:
            options.add_run_config_entry(GRAPH_ID, graph)
        return options

    def _may_record(self) -> bool:
        """Whether this is the thread that had the first run."""
        here = threading.get_ident()
        if here not in self._threads:
            self._threads.append(here)
            if here != self._threads[0]:
                self._leave("ONNX Runtime records in one thread, and another had the first run")
        return here == self._threads[0]

    def _leave(self, why: str) -> None:
        logger.warning("%s runs without a CUDA graph: %s", self._name, why)
