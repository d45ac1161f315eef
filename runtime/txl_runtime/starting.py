"""How this project starts other processes: apart from the folder that its user stands in, which may be a stranger's.

A process that is started with `-m` or `-c` imports from its working folder before any other. Python 3.11 can be told
not to, 3.10 cannot; and for each of them an empty entry of PYTHONPATH is that folder too.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

APART = Path(os.__file__).parent
"""The folder of Python's own modules, from which every process imports in any case."""


def environment() -> dict[str, str]:
    """The environment of a process that is started in `APART`: it imports from where this one does."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(place).absolute()) for place in sys.path if place)}


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Stand in `APART` while multiprocessing starts a process: it stays there, and imports from where this one does."""
    before = Path.cwd()
    os.chdir(APART)
    try:
        yield
    finally:
        os.chdir(before)
