"""Check that results are written outside the sources from which they are made."""

from __future__ import annotations

import contextlib
from pathlib import Path

from txl_runtime.errors import UsageError


def refuse_inside(out: Path, *places: Path) -> None:
    """Refuse an output path that is inside, or equal to, one of the inputs.

    Raises:
        UsageError: `out` is one of `places`, or lies inside one of these folders.
    """
    for place in places:
        with contextlib.suppress(OSError):
            target, within = out.resolve(), place.resolve()
            if target == within or within in target.parents:
                raise UsageError(f"{out}: lies in {place}, expected a place beside it; give another -o")
