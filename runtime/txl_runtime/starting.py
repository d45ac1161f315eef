"""How other processes are started, apart from the folder that their user stands in, and what ended them.

That folder may be a stranger's bundle: with `-m`, `-c` or an empty entry of PYTHONPATH, Python imports from it. 3.10
cannot be told not to.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

APART = Path(sys.prefix)
"""The folder of this Python, which is as trusted as Python is."""


def environment() -> dict[str, str]:
    """The environment of a process that stands in `APART`, and imports from where this one does."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(place).absolute()) for place in sys.path if place)}


def signal_of(code: int | None) -> str:
    """The name of the signal that ended a process, from its exit code; empty where it ended by itself."""
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name if code is not None and code < 0 else ""
    return ""
