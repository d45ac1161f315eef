"""How work that takes long says what it is doing."""

from __future__ import annotations

from typing import Protocol


class Listener(Protocol):
    """Hears of stages, progress and warnings; the command line's draws them."""

    def stage(self, title: str, total: int | None = None) -> None:
        """A new stage begins; `total` is its number of steps, if they can be counted."""
        return

    def advance(self, steps: int = 1) -> None:
        """Some steps of the stage are done."""
        return

    def warn(self, message: str) -> None:
        """Something a user should know, in one line."""
        return


class Silent(Listener):
    """Listens and says nothing."""
