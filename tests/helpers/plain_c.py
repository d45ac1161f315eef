"""Packages in plain C for tests: the bundles they are made of, compilers, programs around them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

BUNDLES = Path(__file__).parents[2] / "conformance" / "bundles"
COMPILERS = ("gcc", "clang")


def need(*tools: str) -> None:
    """Skip a test where a tool is missing."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")


def build(folder: Path, program: Path, *sources: object, compiler: str = "cc", flags: str = "-O2") -> Path:
    """Compile sources as C99, with the package's folder for its header."""
    command = [compiler, "-std=c99", *flags.split(), "-I", folder, *sources, "-o", program, "-lm"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return program


def run(program: Path, *arguments: object, **more: object) -> str:
    """Run a program that has to end well; returns its output."""
    command = [str(part) for part in (program, *arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=program.parent, **more)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout
