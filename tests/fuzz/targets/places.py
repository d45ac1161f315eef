"""Good files for targets, and the places of hostile ones."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

FIXTURES = Path(__file__).parents[2] / "fixtures"
BASES = Path(__file__).parents[3] / "conformance" / "bad_bundles" / "bases"
OLD = FIXTURES / "release_0_8"


@cache
def folder() -> Path:
    """A folder of this process, in memory where the machine has such a place; it is gone when the process ends."""
    memory = Path("/dev/shm")
    made = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def written(name: str, data: bytes) -> Path:
    """A file of these bytes."""
    path = folder() / name
    path.write_bytes(data)
    return path
