"""Run `txl-deploy` from start to exit: signals, exit codes, and errors in one line.

Exit codes: 0 ok · 1 a check failed · 2 wrong use or bad input · 130 interrupted. With --json, stdout is one JSON
document and everything else goes to stderr. Nothing heavy is imported before it is needed (`txl_deploy.verbs`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from txl_deploy import stopping, terminal

TRACEBACK = "TXL_DEPLOY_TRACEBACK"
"""Environment variable that makes a defect of this program show its traceback."""
COMMAND = "txl-deploy"
COMPLETION = "_TXL_DEPLOY_COMPLETE"
"""Environment variable by which a shell asks for completions, and a user for the script that installs them."""
COMMAND_LINE = ("typer", "rich")
"""Packages of the command line besides the runtime's: the extra `cli`, which an embedding application leaves out."""


def main() -> NoReturn:
    """Run the command line and exit."""
    terminal.settle()
    if missing := [name for name in COMMAND_LINE if find_spec(name) is None]:
        sys.exit(_lacks(missing))
    stopping.listen()
    code = _run()
    stopping.finish()
    terminal.leave()
    sys.exit(code)


def _lacks(missing: list[str]) -> int:
    """Print how to install the command line, without the modules that are missing; return the exit code."""
    from txl_runtime.installing import pip_line

    line = (
        f"the command line needs {' and '.join(missing)}, not installed here; {pip_line('cli')}, with export in place "
        "of cli to export models too"
    )
    sys.stderr.write(f"error: {line}\n")
    if "--json" in sys.argv:
        import json

        sys.stdout.write(json.dumps({"error": line, "exit_code": 2}, indent=2) + "\n")
    return 2


def _run() -> int:
    try:
        from txl_deploy.verbs import app

        code = app(prog_name=COMMAND, complete_var=COMPLETION, standalone_mode=False)
        sys.stdout.flush()
    except BaseException as error:
        if _has_lost_its_reader(error):
            terminal.silence(sys.stdout)
            return 141  # the exit code that shells give a program ended by SIGPIPE
        if isinstance(error, SystemExit) and (COMPLETION in os.environ or "-completion" in "".join(sys.argv[1:2])):
            return int(error.code or 0)
        return _stopped() or _explain(error)
    # typer turns some interrupts into an exit code
    return (_stopped() or code) if isinstance(code, int) and code else 0


def _has_lost_its_reader(error: BaseException | None) -> bool:
    """Return True if standard output's reader is gone; rich reports that by SystemExit."""
    if isinstance(error, SystemExit):
        error = error.__context__
    return isinstance(error, BrokenPipeError)


def _explain(error: BaseException) -> int:
    """Report the error that ended the run in one line, a defect of this program as well."""
    from txl_runtime.errors import TxlError
    from typer import Abort

    if isinstance(error, TxlError):
        line, _, more = str(error).partition("\n")  # only the error's own line ends: those in quoted text are escaped
        code = _fail(line, error.exit_code, getattr(error, "details", {}))
        if more:
            from txl_deploy.console import stderr

            stderr.print(more, soft_wrap=True)
        return code
    if isinstance(error, KeyboardInterrupt | Abort):
        return _fail("interrupted", 130)
    if isinstance(error, OSError | MemoryError):
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
        return _fail(f"{said}; expected the machine to have room and rights for this", 2)
    # Wrong use, found by typer; its own copy of click cannot be imported under a stable name.
    if hasattr(error, "format_message"):
        said = error.format_message().rstrip(".").replace(": Value error, ", ": ")
        see = " See" if said.endswith("?") else "; see"
        return _fail(f"{said}{see} {getattr(getattr(error, 'ctx', None), 'command_path', COMMAND)} --help", 2)
    if os.environ.get(TRACEBACK):
        raise error
    last = traceback.extract_tb(error.__traceback__)[-1]
    return _fail(
        f"{type(error).__name__}: {str(error)[:300]} ({Path(last.filename).name}:{last.lineno}); this is a defect of "
        f"txl-deploy, which should have said what is wrong: {TRACEBACK}=1 shows where it arose; report it, please",
        2,
    )


def _fail(message: str, code: int, details: Mapping[str, object] | None = None) -> int:
    try:
        from txl_deploy.console import plain, print_json, stderr
    except ImportError:  # an interrupt came while NumPy was being imported, and a second import would fail
        sys.stderr.write(f"error: {message}\n")
        return code

    line = plain(" ".join(message.split()))
    if "--json-logs" in sys.argv:  # every line of the log is promised to be JSON
        from txl_deploy.serve.logs import Log

        Log(as_json=True).say("failed", "", problem=line, exit_code=code)
    else:
        stderr.print(f"error: {line}", soft_wrap=True, style="red" if stderr.is_terminal else None)
    if "--json" in sys.argv:
        with contextlib.suppress(OSError):  # the exit code still tells the caller
            print_json({"error": line, "exit_code": code, **(details or {})})
    return code


def _stopped() -> int:
    """Return the exit code of a run that a signal stopped; 0 for any other."""
    if not (number := stopping.received()):
        return 0
    return _fail("interrupted" if number == signal.SIGINT else "terminated", 128 + number)
