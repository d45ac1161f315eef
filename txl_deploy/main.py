"""`txl-deploy`, from start to exit: signals, exit codes, and errors in one line.

Exit codes: 0 ok · 1 a check failed · 2 wrong use or bad input · 130 interrupted. With --json, stdout is one JSON
document and everything else goes to stderr. Nothing heavy is imported before it is needed (`txl_deploy.verbs`).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from types import FrameType
from typing import NoReturn

COMMAND_LINE = ("typer", "rich")
"""What the command line needs beside the runtime: the extra `cli`, which an embedding application does not install."""

_received: list[int] = []
"""Signals that told this run to stop."""


def main() -> NoReturn:
    """Run the command line and exit."""
    if missing := [name for name in COMMAND_LINE if find_spec(name) is None]:
        sys.exit(_lacks(missing))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    sys.exit(_run())


def _lacks(missing: list[str]) -> int:
    """Say how to install the command line; written without the modules that are missing."""
    line = (
        f"the command line needs {' and '.join(missing)}, not installed here; pip install 'txl-deploy[cli]', "
        "or 'txl-deploy[export]' to export models too"
    )
    sys.stderr.write(f"error: {line}\n")
    if "--json" in sys.argv:
        import json

        sys.stdout.write(json.dumps({"error": line, "exit_code": 2}, indent=2) + "\n")
    return 2


def _run() -> int:
    _received.clear()
    try:
        from txl_deploy.verbs import app

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
    from txl_runtime.errors import TxlError
    from typer import Abort

    if isinstance(error, TxlError):
        return _fail(str(error), error.exit_code, getattr(error, "details", {}))
    if isinstance(error, KeyboardInterrupt | Abort):
        return _fail("interrupted", 130)
    if isinstance(error, OSError | MemoryError):
        return _fail(f"{type(error).__name__}: {error}; expected the machine to have room and rights for this", 2)
    # Wrong use, as typer finds it; its own copy of click is not importable by a stable name.
    if hasattr(error, "format_message"):
        return _fail(f"{error.format_message().rstrip('.')}; see txl-deploy --help", 2)
    raise error


def _fail(message: str, code: int, details: Mapping[str, object] | None = None) -> int:
    from txl_deploy.console import print_json, stderr

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
