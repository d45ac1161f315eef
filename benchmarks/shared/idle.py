"""A program that does nothing in place of an engine's; the rest of a step is the time of the host and the driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Idle"]


class Idle:
    """A program whose launch does nothing; with a ring, each state is updated in place, as in a real engine."""

    def __init__(self, program: Any, states: Any, recordable: bool) -> None:
        ring = program.update == "ring"
        self.program, self.recordable = program, recordable
        self.in_place = {state.output: state.input for state in states} if ring else {}

    def prepare(self, addresses: Any, queue: Any) -> Callable[[], None]:
        """Return an empty launch for these addresses."""
        return lambda: None
