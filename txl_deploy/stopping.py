"""Stop a run by signals: each unwinds it, so that unfinished files are removed, and is remembered.

A library that calls back at the wrong moment drops the exception: ONNX Runtime does so while it is imported, and Python
if the signal arrives during a clean-up.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

_received: list[int] = []
_tell_dropped = sys.unraisablehook


def listen() -> None:
    """Let signals stop the run from now on."""
    _received.clear()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    sys.unraisablehook = _dropped


def finish() -> None:
    """Ignore interrupts from now on: all output is written, so nothing is left to stop.

    Python handles no signal while libraries are unloaded, so a late interrupt would end the process by its default.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def received() -> int:
    """Return the first signal that arrived, even if its exception was dropped; 0 for none."""
    return _received[0] if _received else 0


def require_going() -> None:
    """Stop the run if a signal arrived and its exception was dropped.

    Raises:
        KeyboardInterrupt: the signal was SIGINT.
        SystemExit: it was SIGTERM.
    """
    if number := received():
        _raise(number)


def _dropped(found: sys.UnraisableHookArgs) -> None:
    """Print nothing for a dropped exception that was raised here: the run ends at its next stage and says why."""
    if not (_received and isinstance(found.exc_value, KeyboardInterrupt | SystemExit)):
        _tell_dropped(found)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    _received.append(number)
    _raise(number)


def _raise(number: int) -> NoReturn:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
