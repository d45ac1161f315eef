"""Signals that tell a run to stop: each unwinds it, so that unfinished files are removed, and is remembered.

A library that is called back in the wrong moment drops the exception: ONNX Runtime does while it is imported, and
Python where the signal comes while something is cleaned up.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

_received: list[int] = []
_tell_dropped = sys.unraisablehook


def listen() -> None:
    """Let signals stop what runs from now on."""
    _received.clear()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    sys.unraisablehook = _dropped


def finish() -> None:
    """Let the process end in its own way, since all is said: an interrupt that comes now has nothing left to stop.

    While libraries are unloaded, Python no longer listens, and the process would end as if by the signal.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def received() -> int:
    """The first signal that came, whoever dropped it; 0 for none."""
    return _received[0] if _received else 0


def require_going() -> None:
    """Stop what runs where a signal has told it to and somebody dropped that.

    Raises:
        KeyboardInterrupt: it was interrupted.
        SystemExit: it was told to end.
    """
    if number := received():
        _raise(number)


def _dropped(found: sys.UnraisableHookArgs) -> None:
    """Say nothing of an exception that was raised here: the run ends at its next stage and says why."""
    if not (_received and isinstance(found.exc_value, KeyboardInterrupt | SystemExit)):
        _tell_dropped(found)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    _received.append(number)
    _raise(number)


def _raise(number: int) -> NoReturn:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
