"""Keep results beside their sources, and never inside them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from txl_runtime.errors import UsageError


def refuse_inside(out: Path, *places: Path) -> None:
    """Refuse an output that would become a part of the input.

    Raises:
        UsageError: it lies in one of these folders, or is one of these files.
    """
    for place in places:
        with contextlib.suppress(OSError):
            found, within = out.resolve(), place.resolve()
            if found == within or within in found.parents:
                raise UsageError(f"{out}: lies in {place}, expected a place beside it; give another -o")
