"""A terminal of its own for a command: what a person sees of it, what Ctrl-C does to it, and what it leaves behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CTRL_C = b"\x03"
COMMAND = (sys.executable, "-m", "txl_deploy")
BAR = "━"
"""The character of which rich draws bars."""
ROWS = 24

_HELD = """
import sys, time
from txl_deploy.main import main

def hold(event, arguments):
    if event == "open" and not held and str(arguments[0]).endswith(end):
        held.append(True)
        print("held", file=sys.stderr, flush=True)
        while True:
            time.sleep(0.01)

held, end = [], sys.argv.pop(1)
sys.addaudithook(hold)
main()
"""
_PIECES = re.compile(r"\x1b\[([?\d;]*)([a-zA-Z])|([\r\n])|([^\x00-\x1f\x7f]+)")


def held_at(end: str) -> tuple[str, ...]:
    """The command, which says "held" and waits for Ctrl-C where it opens a file of such a name: it is done too soon."""
    return (sys.executable, "-c", _HELD, end)


@dataclass(frozen=True)
class Left:
    """The end of a command, and its output.

    Attributes:
        code: its exit code; minus the signal that ended it.
        output: all that it sent to the terminal.
        lines: what stands there in the end, and above it.
        torn: bars that did not fit into a line, so that the terminal went on in the next; those before Ctrl-C, because
            an interrupt between writing and knowing of it makes rich write once more.
        hidden: whether the cursor is.
        settings_kept: whether those of the terminal are as they were.
    """

    code: int
    output: str
    lines: list[str]
    torn: list[str]
    hidden: bool
    settings_kept: bool


def in_a_terminal(
    command: Sequence[object],
    columns: int = 80,
    at: str = "",
    press: bytes | int = b"",
    seconds: float = 150,
    folder: Path | None = None,
    **environment: str,
) -> Left:
    """Run a command in a terminal; it is killed after `seconds`.

    Args:
        at: once this pattern is found in what it wrote, something is pressed.
        press: what, or the number of a signal.

    Raises:
        AssertionError: it, or something that it started, still ran after `seconds`; or nothing was pressed.
    """
    surroundings = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH", "TMPDIR") if name in os.environ}
    surroundings |= {"TERM": "xterm-256color", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"} | environment
    ours, inside = os.openpty()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, ours)
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        before = termios.tcgetattr(inside)
        # The first process of a session is controlled by the terminal that it opens: so Ctrl-C is a signal to it.
        opened = ["sh", "-c", 'exec "$@" 0<>"$0" 1>&0 2>&0', os.ttyname(inside), *map(str, command)]
        process = subprocess.Popen(opened, start_new_session=True, cwd=folder, env=surroundings)
        stack.callback(process.wait)
        stack.callback(_kill, process.pid)
        ended = os.pidfd_open(process.pid)
        stack.callback(os.close, ended)
        output, drawn, until = b"", None, time.monotonic() + seconds
        while True:
            found, _, _ = select.select([ours, ended], [], [], max(until - time.monotonic(), 0))
            shown = output.decode(errors="replace")
            assert found, f"after {seconds} s it was still running: {shown[-2000:]!r}"
            if ours in found:
                try:
                    output += os.read(ours, 1 << 16)
                except OSError:  # nobody has the terminal open any more
                    break
            elif ended in found and inside >= 0:
                kept = termios.tcgetattr(inside) == before
                os.close(inside)
                inside = -1
            if press and re.search(at, output.decode(errors="ignore")):
                os.write(ours, press) if isinstance(press, bytes) else os.kill(process.pid, press)
                press, drawn = b"", len(output)
        assert not press, f"it ended without {at!r}: {output.decode(errors='replace')[-2000:]!r}"
        text = output.decode(errors="replace")  # as terminals show what is no text
        lines, _, hidden = seen(text.replace("^C", ""), columns)
        _, torn, _ = seen(output[:drawn].decode(errors="ignore"), columns)
        return Left(process.wait(), text, lines, [line for line in torn if BAR in line], hidden, kept)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def seen(output: str, columns: int) -> tuple[list[str], list[str], bool]:
    """The lines that a terminal shows, those torn, and whether its cursor is hidden.

    Raises:
        AssertionError: something was sent that no bar needs, and that this terminal does not know.
    """
    rows, row, column, at = [""], 0, 0, 0
    torn, hidden = [], False
    for piece in _PIECES.finditer(output):
        assert piece.start() == at, f"not known: {output[at:][:40]!r}"
        at = piece.end()
        value, control, end, text = piece.groups()
        if control == "A":
            row = max(row - int(value or 1), 0)
        elif control == "K" and value == "2":
            rows[row] = ""
        elif value == "?25" and control in ("l", "h"):
            hidden = control == "l"
        elif end == "\r":
            column = 0
        elif end == "\n":
            row += 1
        elif text:
            if column + len(text) > columns:
                torn.append(rows[row][:column] + text)
            for letter in text:
                if column == columns:
                    row, column = row + 1, 0
                    rows += [""] * (row + 1 - len(rows))
                rows[row] = rows[row][:column].ljust(column) + letter + rows[row][column + 1 :]
                column += 1
        else:
            assert control == "m", f"not known: {piece.group()!r}"
        rows += [""] * (row + 1 - len(rows))
    assert at == len(output), f"not known: {output[at:][:40]!r}"
    return [line.rstrip() for line in rows], torn, hidden
