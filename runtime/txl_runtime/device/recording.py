"""The records of a call's work, and their status: not begun, made for some sets of results, or given up."""

from __future__ import annotations

import logging

from txl_runtime.device.cuda import Queue
from txl_runtime.device.interface import Launch
from txl_runtime.errors import BackendError

logger = logging.getLogger(__name__)

MOST_RECORDS = 4
"""Maximum number of sets of results for which a call has records; each record takes memory, and time to make."""
MOST_FAILURES = 3
"""Number of failed records after which recording is given up; a single failure may be due to other libraries."""


class Recording:
    """The records of one call's work.

    Attributes:
        possible: False if the work cannot be recorded; True until this is known.
        said: "not yet", "recorded", "by the engine", or the reason why the last record failed.
        records: number of sets of results with a record.
    """

    def __init__(self, possible: bool) -> None:
        self.possible, self.said, self.records = possible, "not yet" if possible else "by the engine", 0
        self._failures = 0

    def record(self, name: str, queue: Queue, work: Launch) -> Launch | None:
        """Record the work of a program and return a function that replays it; None if recording failed."""
        try:
            replay = queue.capture(work)
        except BackendError as error:
            self.said, self._failures = str(error), self._failures + 1
            if self._failures == MOST_FAILURES:
                self.possible = False
                # log the text, not the error object, which would keep the work alive
                logger.warning("%s runs without being recorded: %s", name, self.said)
            return None
        self.said = "recorded"
        return replay
