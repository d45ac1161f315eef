"""Draw pictures if matplotlib is installed, without a display and without pyplot's global state."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from txl_runtime.bundle.writing import plain_place, write_named
from txl_runtime.errors import UsageError

from txl_deploy.extras import require

FORMATS = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Refuse a picture that cannot be written, before anything is measured for it.

    Raises:
        UsageError: the name has a different suffix, its folder does not exist, or something else than a file is there.
        BackendError: matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--plot is {path}, expected a name that ends in {' or '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot is {path}, expected a folder that exists; make {path.parent} first")
    plain_place(path)
    require("--plot", "plot", "matplotlib")


def draw(path: Path, panels: list[Callable[[Any], None]]) -> None:
    """Write a picture of several panels, one under the other; each function draws into matplotlib axes of its own."""
    figure = import_module("matplotlib.figure").Figure(figsize=(9, 3.2 * len(panels)), layout="constrained")
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        panel(axes)
    picture = BytesIO()
    figure.savefig(picture, dpi=150, format=path.suffix[1:].lower())
    write_named(path, picture.getvalue())
