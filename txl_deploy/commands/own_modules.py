"""Check the arguments that name a user's own model, e.g. FILE.py:FUNCTION, and show the traceback if its file fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from txl_export.tensorflow import refuse_tensorflow
from txl_runtime.errors import TxlError, UsageError

from txl_deploy.console import stderr
from txl_deploy.stopping import received


def of_own_module(given: str) -> str | None:
    """Return the argument if it names a function of a Python file; None if not, e.g. for the path of a checkpoint."""
    file, _, function = given.rpartition(":")
    own = not Path(given).exists() and bool(function) and (file.endswith(".py") or Path(file).is_file())
    return given if own else None


def check_source(given: str) -> None:
    """Check that the source exists before PyTorch is imported, which takes seconds.

    Raises:
        UsageError: there is no such file, or a Python file is named without a function.
    """
    # the part before the colon in FILE.py:FUNCTION or FOLDER:NODE
    file = given if Path(given).exists() else given.rpartition(":")[0] or given
    refuse_tensorflow(Path(file))
    if not Path(file).exists():
        raise UsageError(
            f"{file}: no such file, expected a checkpoint, FILE.onnx, a folder or FILE.py:FUNCTION; check the path"
        )
    if file == given and given.endswith(".py"):
        raise UsageError(
            f"{given} names no function, expected FILE.py:FUNCTION; give {given}:build if that is its name"
        )


def of_adapter(name: str, checkpoint: str | None, weights: Path | None) -> Path:
    """Return the checkpoint of a package's model, which is given by `--weights` beside `--adapter`.

    Raises:
        UsageError: `--weights` is missing or does not exist, or a CHECKPOINT is given as well.
    """
    if checkpoint is not None:
        raise UsageError(
            f"{checkpoint} and --adapter are both given, and each names a model; leave one of them out, or give "
            "--weights FILE for the adapter"
        )
    if weights is None:
        raise UsageError(f"--adapter {name} is given without --weights; give the package's checkpoint too")
    if not weights.exists():
        raise UsageError(f"{weights}: no such file, expected the package's checkpoint; check --weights")
    return weights


@contextmanager
def own_frames() -> Iterator[None]:
    """Print the part of a traceback in the user's own file, if any, before the error is reported as one line."""
    try:
        yield
    except TxlError as error:
        # not after SIGTERM, whose SystemExit ends the user's module as if the module had called exit
        if (frames := getattr(error, "frames", "")) and not received():
            stderr.print(frames.rstrip(), soft_wrap=True, style="dim" if stderr.is_terminal else None)
        raise
