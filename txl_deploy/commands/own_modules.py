"""Models of the user's own on the command line: FILE.py:FUNCTION, and what is shown when their code fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from txl_runtime.errors import TxlError

from txl_deploy.console import stderr


def of_own_module(given: str) -> str | None:
    """The argument, if it names a function of a Python file: an existing path is a checkpoint, whatever its name."""
    file, _, function = given.rpartition(":")
    own = not Path(given).exists() and bool(function) and (file.endswith(".py") or Path(file).is_file())
    return given if own else None


@contextmanager
def own_frames() -> Iterator[None]:
    """Show the user's part of a traceback, if there is one, before the error becomes one line."""
    try:
        yield
    except TxlError as error:
        if frames := getattr(error, "frames", ""):
            stderr.print(frames.rstrip(), markup=False, soft_wrap=True, style="dim" if stderr.is_terminal else None)
        raise
