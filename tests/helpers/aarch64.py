"""Programs for a 64-bit Arm, compiled here and run by qemu; tests skip where one of both is missing."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
MARCH = "-march=armv8.2-a+dotprod"


def emulated(program: Path, *arguments: object, given: Sequence[object] = ()) -> bytes:
    """Compile a program, statically, and return what it prints under qemu, called with what is given."""
    if missing := [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed: no numbers of a 64-bit Arm here")
    command = [
        COMPILER,
        "-static",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        *map(str, arguments),
        "-o",
        str(program),
        "-lm",
    ]
    subprocess.run(command, check=True)
    command = [EMULATOR, str(program), *map(str, given)]
    return subprocess.run(command, check=True, capture_output=True, timeout=300).stdout
