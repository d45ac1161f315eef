"""`txl-deploy`: verbs, exit codes, and errors in one line.

Exit codes: 0 ok · 1 a check failed · 2 wrong use or bad input · 130 interrupted. With --json, stdout is one JSON
document and everything else goes to stderr.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from types import FrameType
from typing import NoReturn

import typer
from txl_runtime.errors import TxlError

from txl_deploy.commands import bench, build, export, generate, inspect, score, selftest, verify
from txl_deploy.console import print_json, stderr

__all__ = ["app", "main"]

_received: list[int] = []
"""Signals that told this run to stop."""

app = typer.Typer(
    name="txl-deploy",
    help="From a trained Transformer-XL to a verified bundle, and streaming from it.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (inspect, export, build, verify, selftest, generate, score, bench):
    app.command(name=command.__name__.rpartition(".")[2])(command.run)


@app.callback(invoke_without_command=True)
def _version(
    context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version.")
) -> None:
    if version:
        from importlib.metadata import version as installed

        typer.echo(installed("txl-deploy"))
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> NoReturn:
    """Run the command line and exit."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    sys.exit(_run())


def _run() -> int:
    _received.clear()
    try:
        code = app(standalone_mode=False)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone; there is nobody left to tell
        return 141  # as a shell counts a program that a closed pipe ended
    except BaseException as error:
        return _stopped() or _explain(error)
    # typer makes an exit code of some interrupts
    return (_stopped() or code) if isinstance(code, int) and code else 0


def _explain(error: BaseException) -> int:
    """Tell what ended the run in one line; errors that are nobody's but ours are raised again, with their traceback."""
    if isinstance(error, TxlError):
        return _fail(str(error), error.exit_code, getattr(error, "details", {}))
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return _fail("interrupted", 130)
    if isinstance(error, OSError | MemoryError):
        return _fail(f"{type(error).__name__}: {error}; expected the machine to have room and rights for this", 2)
    # Wrong use, as typer finds it; its own copy of click is not importable by a stable name.
    if hasattr(error, "format_message"):
        return _fail(f"{error.format_message().rstrip('.')}; see txl-deploy --help", 2)
    raise error


def _fail(message: str, code: int, details: Mapping[str, object] | None = None) -> int:
    line = " ".join(message.split())
    stderr.print(f"error: {line}", markup=False, soft_wrap=True, style="red" if stderr.is_terminal else None)
    if "--json" in sys.argv:
        print_json({"error": line, "exit_code": code, **(details or {})})
    return code


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """Unwind, so that unfinished files are removed; remembered, because not every library lets an interrupt through."""
    _received.append(number)
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def _stopped() -> int:
    """The exit code of a run that was told to stop; 0 for one that was not."""
    if not _received:
        return 0
    return _fail("interrupted" if _received[0] == signal.SIGINT else "terminated", 128 + _received[0])
