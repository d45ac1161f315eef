"""Stop a run by signals: a signal raises an exception, so that unfinished files are removed, and is recorded.

The signal is recorded because its exception may be dropped: by ONNX Runtime while it is imported, and by Python if the
signal arrives while an object is deleted.
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
    """Ignore interrupts from now on; call this when all output is written.

    Python handles no signal while libraries are unloaded, so a late interrupt would kill the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def received() -> int:
    """Return the first signal that arrived, even if its exception was dropped; 0 if none arrived."""
    return _received[0] if _received else 0


def require_going() -> None:
    """Stop the run if a signal arrived and its exception was dropped.

    Raises:
        KeyboardInterrupt: the signal was SIGINT.
        SystemExit: the signal was SIGTERM.
    """
    if number := received():
        _raise(number)


def _dropped(dropped: sys.UnraisableHookArgs) -> None:
    """Print nothing for a dropped exception that a signal raised: the run ends at its next stage and reports it."""
    if not (_received and isinstance(dropped.exc_value, KeyboardInterrupt | SystemExit)):
        _tell_dropped(dropped)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    _received.append(number)
    _raise(number)


def _raise(number: int) -> NoReturn:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
