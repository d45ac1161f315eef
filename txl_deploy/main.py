"""Run `txl-deploy` from start to exit: signals, exit codes, and errors in one line.

Exit codes: 0 ok · 1 a check failed · 2 wrong use or bad input · 130 interrupted. With --json, stdout has one JSON
document, and everything else goes to stderr. Large packages are imported only when a verb needs them (`verbs`).
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
from traceback import walk_tb
from typing import NoReturn

from txl_deploy import stopping, terminal

TRACEBACK = "TXL_DEPLOY_TRACEBACK"
"""Environment variable that makes the program show the traceback of a defect."""
COMMAND = "txl-deploy"
"""Name of the command line's program."""
COMPLETION = "_TXL_DEPLOY_COMPLETE"
"""Environment variable by which a shell asks for completions, or a user for the script that installs them."""
OWN = ("txl_deploy", "txl_export", "txl_engines", "txl_report", "txl_runtime", "__main__")
"""This project's packages."""
COMMAND_LINE = ("typer", "rich")
"""Packages of the extra `cli`, which only the command line needs; applications that embed the runtime lack them."""


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
    """Print that packages are missing and how to install them, without importing them; return the exit code."""
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
            return 141  # the exit code that shells give to a program ended by SIGPIPE
        if isinstance(error, SystemExit) and (COMPLETION in os.environ or "-completion" in "".join(sys.argv[1:2])):
            return int(error.code or 0)
        return _stopped() or _explain(error)
    # typer turns some interrupts into an exit code, so the signal is asked first
    return (_stopped() or code) if isinstance(code, int) and code else 0


def _has_lost_its_reader(error: BaseException | None) -> bool:
    """Return True if the reader of standard output has closed it, which rich reports by SystemExit."""
    if isinstance(error, SystemExit):
        error = error.__context__
    return isinstance(error, BrokenPipeError)


def _explain(error: BaseException) -> int:
    """Report the error that ended the run in one line, even if it is a defect of this program."""
    # checked first, because the modules that are imported below may need the broken package
    if (package := _broken_package(error)) and not os.environ.get(TRACEBACK):
        return _fail(
            f"the package {package} cannot be imported: {_with_place(error)}; expected one that works here; install it "
            "again, or look at PYTHONPATH for a second one",
            2,
        )
    from txl_runtime.errors import TxlError
    from typer import Abort

    if isinstance(error, TxlError):
        # only the error itself has line ends: in the texts that it quotes, line ends are escaped
        line, _, more = str(error).partition("\n")
        code = _fail(line, error.exit_code, getattr(error, "details", {}))
        if more:
            from txl_deploy.console import stderr

            stderr.print(more, soft_wrap=True)
        return code
    if isinstance(error, KeyboardInterrupt | Abort):
        return _fail("interrupted", 130)
    if isinstance(error, OSError | MemoryError):
        message = f"{type(error).__name__}: {error}".removesuffix(": ")
        return _fail(f"{message}; expected the machine to have room and rights for this", 2)
    # this is wrong use, reported by typer, whose copy of click has no stable name from which to import the class
    if hasattr(error, "format_message"):
        message = error.format_message().rstrip(".").replace(": Value error, ", ": ")
        see = " See" if message.endswith("?") else "; see"
        return _fail(f"{message}{see} {getattr(getattr(error, 'ctx', None), 'command_path', COMMAND)} --help", 2)
    if os.environ.get(TRACEBACK):
        raise error
    return _fail(
        f"{_with_place(error)}; this is a defect of txl-deploy, which should have said what is wrong: {TRACEBACK}=1 "
        "shows where it arose; report it, please",
        2,
    )


def _with_place(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:300]} ({Path(last.filename).name}:{last.lineno})"


def _broken_package(error: BaseException) -> str:
    """Return the name of the third-party package whose import raised an error.

    The name is "" if the error arose outside such an import, or if the machine or the user ended the import.
    """
    if not isinstance(error, Exception) or isinstance(error, OSError | MemoryError):
        return ""
    names = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in walk_tb(error.__traceback__)]
    package, importing = names[-1], "importlib" in names
    if isinstance(error, ImportError) and package in OWN:  # e.g. `from numpy import ndarray` of a numpy that has none
        package, importing = (error.name or "").partition(".")[0], True
    return package if importing and package not in (*OWN, "", "importlib") else ""


def _fail(message: str, code: int, details: Mapping[str, object] | None = None) -> int:
    try:
        from txl_deploy.console import plain, print_json, stderr
    except Exception:  # NumPy's import was interrupted and would fail again, or a package is broken
        sys.stderr.write(f"error: {message}\n")
        return code

    line = plain(" ".join(message.split()))
    if "--json-logs" in sys.argv:  # with this option, every line on stderr must be JSON
        from txl_deploy.serve.logs import Log

        Log(as_json=True).say("failed", "", problem=line, exit_code=code)
    else:
        stderr.print(f"error: {line}", soft_wrap=True, style="red" if stderr.is_terminal else None)
    if "--json" in sys.argv:
        with contextlib.suppress(OSError):  # the exit code still reports the failure
            print_json({"error": line, "exit_code": code, **(details or {})})
    return code


def _stopped() -> int:
    """Return the exit code of a run that was stopped by a signal; 0 if it was not."""
    if not (number := stopping.received()):
        return 0
    return _fail("interrupted" if number == signal.SIGINT else "terminated", 128 + number)
