"""The listener, to which long operations report stages, progress and warnings."""

from __future__ import annotations

from typing import Protocol


class Listener(Protocol):
    """A receiver of stages, progress and warnings; the command line's listener draws them."""

    def stage(self, title: str, total: int | None = None) -> None:
        """Begin a new stage; `total` is the stage's number of steps, if known."""
        return

    def advance(self, steps: int = 1) -> None:
        """Report that `steps` more steps of the stage are done."""
        return

    def warn(self, message: str) -> None:
        """Report a warning of one line."""
        return


class Silent(Listener):
    """A listener that ignores everything."""
