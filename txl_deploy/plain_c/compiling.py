"""Compile a package with this machine's C compiler, and measure its code."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from txl_runtime.errors import BackendError, one_line
from txl_runtime.starting import APART, environment

from txl_deploy.plain_c.rendering import FLAGS


def find_compiler() -> list[str]:
    """Return the compiler's command, from the environment variable CC; ["cc"] if it is not set.

    Raises:
        BackendError: no compiler was found; or this is Windows, and the comparison is written for POSIX.
    """
    if sys.platform == "win32":
        raise BackendError(
            "a package cannot be compared with its bundle on Windows, expected POSIX; package elsewhere, or with "
            "--unverified and run its own test"
        )
    try:
        command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    except ValueError as error:
        raise BackendError(f"CC is {os.environ['CC']!r}, expected a command of a shell: {one_line(error)}") from None
    path = shutil.which(command[0])
    if path is None:
        raise BackendError(
            f"found no compiler of C ({command[0]}), expected one, with which a package is compiled and compared with "
            "the bundle; install one, name it in CC, or package with --unverified"
        )
    return [str(Path(path).absolute()), *command[1:]] if os.sep in command[0] else command


def compile_replay(
    compiler: list[str], folder: Path, name: str, replay: Path, options: str = FLAGS
) -> tuple[Path, Path]:
    """Compile a package's source, and the program that replays steps on it.

    Returns:
        The object file of the package's source, and the program. Both lie beside the program's source, `replay`.

    Raises:
        BackendError: the compiler refuses.
    """
    compiled, program = replay.with_name(f"{name}.o"), replay.with_suffix("")
    flags = ["-std=c99", *options.split(), "-I."]
    _run([*compiler, *flags, "-c", f"{name}.c", "-o", str(compiled)], folder)
    _run([*compiler, *flags, str(replay), str(compiled), "-o", str(program), "-lm", "-pthread"], folder)
    return compiled, program


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(  # noqa: S603
            command, cwd=folder, env=environment(), capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise BackendError(f"{command[0]} cannot be started: {error.strerror}; name another compiler in CC") from None
    if done.returncode:
        lines = done.stderr.splitlines()
        message = next(
            (line for line in lines if "error" in line), lines[0] if lines else f"exit code {done.returncode}"
        )
        raise BackendError(
            f"{command[0]} does not compile the C of this model: {one_line(ValueError(message))}; name another in CC"
        )


def code_bytes(compiled: Path) -> int | None:
    """Return the bytes of machine code in an object file, without constants; None if binutils' `size` is missing."""
    size = shutil.which("size")
    if size is None:
        return None
    done = subprocess.run(  # noqa: S603
        [size, "-A", str(compiled)], cwd=APART, env=environment(), capture_output=True, text=True, check=False
    )
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(".text")]
    return sum(int(line[1]) for line in lines) if lines else None
