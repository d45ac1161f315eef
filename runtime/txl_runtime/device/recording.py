"""How far recording a call's work has come: not begun, made for some sets of results, or given up."""

from __future__ import annotations

import logging

from txl_runtime.device.cuda import Queue
from txl_runtime.device.interface import Launch
from txl_runtime.errors import BackendError

logger = logging.getLogger(__name__)

MOST_RECORDS = 4
"""Sets of results that a program and side of the memory has records for. Each takes memory, and time to be made."""
MOST_FAILURES = 3
"""Records that may fail: other libraries of the process can spoil one, and the next is made all the same."""


class Recording:
    """The records of one call.

    Attributes:
        possible: whether the work can be recorded, as far as is known.
        said: "not yet", "recorded", "by the engine", or why the last record failed.
        records: how many sets of results there is a record for.
    """

    def __init__(self, possible: bool) -> None:
        self.possible, self.said, self.records = possible, "not yet" if possible else "by the engine", 0
        self._failures = 0

    def record(self, name: str, queue: Queue, work: Launch) -> Launch | None:
        """The work of a program as a record to be replayed; None where it failed, and nothing was done."""
        try:
            replay = queue.capture(work)
        except BackendError as error:
            self.said, self._failures = str(error), self._failures + 1
            if self._failures == MOST_FAILURES:
                self.possible = False
                logger.warning("%s runs without being recorded: %s", name, self.said)  # an error would hold the work
            return None
        self.said = "recorded"
        return replay
