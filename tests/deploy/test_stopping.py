"""A signal that a library drops stops the run all the same: a command at its next stage, a server before it serves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import txl_runtime
from frozen import frozen
from step_models import recurrent
from support import call_main
from txl_report import writing

from txl_deploy import main, stopping

Function = Callable[..., Any]
SIGNALS = pytest.mark.parametrize(
    ("number", "code", "told"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
    ids=["INT", "TERM"],
)


@pytest.fixture(autouse=True)
def _received(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "_received", [])  # what comes here is of no further test


def dropping(number: int, real: Function) -> Function:
    """A function that gets a signal and drops it."""

    def call(*arguments: Any, **options: Any) -> Any:
        try:
            os.kill(os.getpid(), number)
        except BaseException:
            return real(*arguments, **options)
        raise AssertionError("no signal came")

    return call


def cleaning(number: int, real: Function) -> Function:
    """A function that gets a signal while something is cleaned up."""

    class Signalled:
        def __del__(self) -> None:
            os.kill(os.getpid(), number)

    def call(*arguments: Any, **options: Any) -> Any:
        Signalled()
        return real(*arguments, **options)

    return call


@SIGNALS
@pytest.mark.parametrize("signalled", [dropping, cleaning])
def test_a_command_ends_at_its_next_stage_and_writes_nothing(
    signalled, number, code, told, tmp_path, monkeypatch, capfd
):
    bundle = recurrent().write(tmp_path / "step.txl")
    monkeypatch.setattr(writing, "gather", signalled(number, writing.gather))
    found, out, err = call_main(["report", bundle, "-o", tmp_path / "page.html"], monkeypatch, capfd)
    assert (found, out, err.splitlines()[-1]) == (code, "", f"error: {told}")
    assert "Traceback" not in err
    assert not (tmp_path / "page.html").exists()


@SIGNALS
def test_a_server_does_not_begin_to_serve(number, code, told, monkeypatch, capfd):
    monkeypatch.setattr(txl_runtime, "load", dropping(number, txl_runtime.load))
    ending = threading.Timer(60, os.kill, (os.getpid(), signal.SIGTERM))  # where it serves all the same
    ending.start()
    found, out, err = call_main(["serve", frozen("ring"), "--port", 0], monkeypatch, capfd)
    ending.cancel()
    assert (found, out, err) == (code, "", f"error: {told}\n")


def test_an_interrupt_after_all_is_said_changes_nothing():
    """Libraries take a while to be unloaded, and Python no longer listens then.

    `raise` gets the exit code of wrong use as its argument here, which is the number of SIGINT.
    """
    program = """
import ctypes
from txl_deploy.main import main
libc = ctypes.CDLL(None)
libc.on_exit(libc["raise"], None)
main()
"""
    done = subprocess.run([sys.executable, "-c", program, "--nothing"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 == signal.SIGINT
    assert "No such option" in done.stderr


def test_a_stop_while_numpy_is_imported_is_told_without_it(monkeypatch, capsys):
    """A module that was left in the middle of its import cannot be imported again, and the console needs it."""
    monkeypatch.setitem(sys.modules, "txl_deploy.console", None)
    monkeypatch.setattr(stopping, "received", lambda: signal.SIGINT)
    assert main._stopped() == 130
    assert capsys.readouterr().err == "error: interrupted\n"
