"""Where results go: beside what they are made of, and never into it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from txl_runtime.errors import UsageError


def refuse_inside(out: Path, *places: Path) -> None:
    """Refuse an output that would be a part of what is read.

    Raises:
        UsageError: it lies in one of these folders, or is one of these files.
    """
    for place in places:
        with contextlib.suppress(OSError):
            found, within = out.resolve(), place.resolve()
            if found == within or within in found.parents:
                raise UsageError(f"{out}: lies in {place}, expected a place beside it; give another -o")
