"""The functions of the instruction sets give the same numbers, bit for bit: what a step adds to that is an order."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from aarch64 import MARCH, emulated
from native_steps import compiled
from txl_engines.native import MACHINES, SOURCES, find_compiler

PROGRAM = Path(__file__).with_name("vectors.c")


def made(folder: Path, instructions: str) -> bytes:
    compiled(instructions)  # skips where there is no compiler or no such processor
    command = [*find_compiler(), "-O2", *MACHINES[instructions], f"-I{SOURCES}", PROGRAM, "-o", folder / "vectors"]
    subprocess.run([*command, "-lm"], check=True)
    return subprocess.run([folder / "vectors"], check=True, capture_output=True).stdout


@pytest.mark.parametrize("instructions", ["avx2", "avx512"])
def test_instructions_of_x86_compute_what_plain_c_does(instructions, tmp_path):
    found = made(tmp_path, instructions)
    assert found == made(tmp_path, "plain")
    assert len(found) > 3_000_000


def test_neon_computes_what_plain_c_does(tmp_path):
    assert emulated(tmp_path / "vectors", MARCH, f"-I{SOURCES}", PROGRAM) == made(tmp_path, "plain")
