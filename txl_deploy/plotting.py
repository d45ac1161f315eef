"""Draw pictures with matplotlib, if it is installed; no display is needed, and pyplot's global state is not used."""

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
"""Suffixes of pictures that can be written."""


def check_plot(path: Path) -> None:
    """Check that a picture can be written to a path; commands call this before they measure.

    Raises:
        UsageError: the suffix is not in `FORMATS`, the folder does not exist, or the path is not a plain file.
        BackendError: matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--plot is {path}, expected a name that ends in {' or '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot is {path}, expected a folder that exists; make {path.parent} first")
    plain_place(path)
    require("--plot", "plot", "matplotlib")


def draw(path: Path, panels: list[Callable[[Any], None]]) -> None:
    """Write a picture of panels, one below the other; each function of `panels` draws into the axes of one panel."""
    figure = import_module("matplotlib.figure").Figure(figsize=(9, 3.2 * len(panels)), layout="constrained")
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        panel(axes)
    picture = BytesIO()
    figure.savefig(picture, dpi=150, format=path.suffix[1:].lower())
    write_named(path, picture.getvalue())
