"""Programs for Windows on x86-64, compiled here by MinGW and run by wine; tests skip where one of both is missing."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER = "x86_64-w64-mingw32-gcc-posix"
TOOLS = (COMPILER, "x86_64-w64-mingw32-g++-posix", "wine")


def need_wine() -> None:
    """Skip a test where a tool is missing."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"{', '.join(missing)} not installed (mingw-w64, wine, wine64): nothing of Windows here")


def under_wine(program: Path, home: Path) -> Path:
    """Write the command that runs a program, beside it and without its .exe.

    Args:
        program: path of the .exe.
        home: folder of wine's own files, which its first program makes in some seconds.
    """
    command = program.with_suffix("")
    told = f"WINEPREFIX={shlex.quote(str(home))} WINEDEBUG=-all LC_ALL=C.UTF-8"
    command.write_text(f'#!/bin/sh\n{told} exec wine {shlex.quote(str(program))} "$@"\n')
    command.chmod(0o755)
    return command


def compiled(program: Path, *arguments: object) -> Path:
    """Compile a program or library in C for Windows, which needs no other library."""
    command = [COMPILER, "-static", *map(str, arguments), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return program
