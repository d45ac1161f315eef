"""The runtime in C++, built in one of several ways: each is built once for all processes that test it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]
CPP = ROOT / "runtime" / "cpp"
TOOLS = ("cmake", "ninja", "c++", "pkg-config")
CLANG = ("-DCMAKE_C_COMPILER=clang", "-DCMAKE_CXX_COMPILER=clang++")
DEBUG = ("-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS=-O1")


def done(command: Sequence[str | Path], timeout: float = 1100, **options: object) -> str:
    """Run a command and return its output; a failure shows the end of it."""
    words = [*map(str, command)]
    found = subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False, **options)
    assert found.returncode == 0, f"{command[0]}: {(found.stdout + found.stderr)[-3000:]}"
    return found.stdout


def compiler(built: Path, language: str) -> str:
    """The compiler of C or CXX that a build was made with: the sanitizers are of one compiler."""
    (found,) = re.findall(rf"^CMAKE_{language}_COMPILER:\w+=(.+)", (built / "CMakeCache.txt").read_text(), re.MULTILINE)
    return found


def build(base: Path, name: str, options: Sequence[str], tools: Sequence[str] = ()) -> Path:
    """The folder of a build with every warning an error. Where a tool is missing, the test skips.

    Args:
        base: pytest's folder; processes that share the tests share the build, too.
        name: of the folder of the build.
        options: CMake's.
        tools: programs that the build needs beside the usual ones.
    """
    missing = [tool for tool in (*TOOLS, *tools) if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed, which the runtime in C++ is built with")
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{folder}.lock"):
        command = ["cmake", "-S", CPP, "-B", folder, "-G", "Ninja", "-DTXL_WERROR=ON", *options]
        configured = subprocess.run(command, capture_output=True, text=True, check=False)
        if "nlohmann_json" in configured.stderr and configured.returncode:
            pytest.skip("nlohmann_json is not installed (nlohmann-json3-dev), which the runtime in C++ is built with")
        assert configured.returncode == 0, configured.stderr[-2000:]
        done(["cmake", "--build", folder, "-j", "2"])
    return folder


def sanitized(base: Path) -> Path:
    """The build under the sanitizers, which takes a minute: by clang and with fuzz targets where clang has these."""
    clang = (*CLANG, "-DTXL_FUZZ=ON") if has_fuzzer() else ()
    return build(base, "cpp", ("-DTXL_SANITIZE=ON", *DEBUG, *clang))


def has_fuzzer() -> bool:
    """True where clang is here with its runtime libraries, which Debian has in a package of their own."""
    if not shutil.which("clang++"):
        return False
    return any(Path(done(["clang++", "--print-runtime-dir"]).strip()).glob("libclang_rt.fuzzer*"))
