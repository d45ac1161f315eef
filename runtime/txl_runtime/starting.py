"""The environment and folder in which child processes start, and the name of the signal that ended a child.

A child must not run in the user's current folder, which may be a stranger's bundle: with `-m`, `-c` or an empty entry
of PYTHONPATH, Python imports from that folder. Python 3.10 has no option to prevent this.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

APART = Path(sys.prefix)
"""Current folder of child processes: the folder of this Python installation, which is as trusted as Python itself."""


def environment() -> dict[str, str]:
    """Return the environment of a child in `APART` that imports from the same places as this process."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(place).absolute()) for place in sys.path if place)}


def signal_of(code: int | None) -> str:
    """Return the name of the signal that ended a process, e.g. "SIGKILL" for exit code -9; "" if no signal ended it."""
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name if code is not None and code < 0 else ""
    return ""
