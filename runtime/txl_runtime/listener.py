"""How long work tells what it is doing."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Listener", "Silent"]


class Listener(Protocol):
    """Hears of stages, progress and warnings; the command line's draws them."""

    def stage(self, title: str, total: int | None = None) -> None:
        """A new stage begins; `total` is its number of steps, if they can be counted."""

    def advance(self, steps: int = 1) -> None:
        """Some steps of the stage are done."""

    def warn(self, message: str) -> None:
        """Something a user should know, in one line."""


class Silent:
    """Listens and says nothing."""

    def stage(self, title: str, total: int | None = None) -> None:
        """See `Listener`."""

    def advance(self, steps: int = 1) -> None:
        """See `Listener`."""

    def warn(self, message: str) -> None:
        """See `Listener`."""
