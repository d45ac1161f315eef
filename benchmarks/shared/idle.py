"""A program that does nothing, in place of an engine's program, to time the host's and the driver's part of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Idle"]


class Idle:
    """A program whose launch does nothing. For ring memory it says that states are updated in place, as engines do.

    Args:
        program: the bundle's program that it replaces.
        states: the states of the program's update rule.
        recordable: True if the loop may record the launch into a graph.
    """

    def __init__(self, program: Any, states: Any, recordable: bool) -> None:
        ring = program.update == "ring"
        self.program, self.recordable = program, recordable
        self.in_place = {state.output: state.input for state in states} if ring else {}

    def prepare(self, addresses: Any, queue: Any) -> Callable[[], None]:
        """Return a launch that does nothing, whatever the tensors' addresses and the queue."""
        return lambda: None
