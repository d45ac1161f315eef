"""An engine's program that does nothing: what is left of a step is what the host and the driver take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Idle"]


class Idle:
    """A program whose launch is empty; with a ring each state is updated in place, as in a real engine's."""

    def __init__(self, program: Any, states: Any, recordable: bool) -> None:
        ring = program.update == "ring"
        self.program, self.recordable = program, recordable
        self.in_place = {state.output: state.input for state in states} if ring else {}

    def prepare(self, addresses: Any, queue: Any) -> Callable[[], None]:
        """A launch at these addresses."""
        return lambda: None
