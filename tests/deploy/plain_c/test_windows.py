"""Packages in plain C on Windows: compiled by MinGW without a warning, by each of a package's two ways, run by wine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from building import CPP
from plain_c import BUNDLES, build, need, run
from txl_runtime.errors import BackendError
from wine import COMPILER, need_wine, under_wine

from txl_deploy.plain_c.compiling import find_compiler
from txl_deploy.plain_c.package import package_c

KINDS = {"policy-1": {}, "clusters": {"batch_size": 2}, "int8": {"batch_size": 2, "weights_file": True}, "table": {}}
"""Bundles that the generator writes, or whose step is the project's own, and how they are packaged."""
FLAGS = "-Wall -Wextra -Werror -Wvla -static"
ENV = Path("/usr/bin/env")
TOOLCHAIN = CPP / "tests" / "mingw.cmake"
slow = pytest.mark.slow(keep=1)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of wine's own files."""
    need_wine()
    return tmp_path_factory.mktemp("wine") / "home"


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a package."""
    need("cc")
    out = tmp_path_factory.mktemp("plain") / "c"
    return package_c(BUNDLES / request.param, out, name="model", **KINDS[request.param]).folder


@slow
@pytest.mark.parametrize("processor", ["x86-64", "x86-64-v3"])
def test_a_package_is_compiled_without_a_warning_and_its_own_test_passes(
    kind: Path, home: Path, processor: str, tmp_path: Path
) -> None:
    """By plain C, and by AVX2 where the package has it."""
    sources = (kind / "test_model.c", kind / "model.c")
    flags = f"-O3 -march={processor} {FLAGS}"
    program = build(kind, tmp_path / "replayed.exe", *sources, compiler=COMPILER, flags=flags)
    weights = [kind / "model.weights"] * (kind / "model.weights").exists()
    assert run(under_wine(program, home), *weights).startswith("passed")


@slow
def test_make_and_cmake_build_a_package_for_windows_and_run_its_test(kind: Path, home: Path, tmp_path: Path) -> None:
    need("make", "cmake", "ctest")
    environment = os.environ | {"WINEPREFIX": str(home), "WINEDEBUG": "-all"}
    command = ("make", "-C", kind, "test", f"CC={COMPILER}", "EXE=.exe", "RUN=wine")
    assert "passed" in run(ENV, *command, env=environment)
    run(ENV, "make", "-C", kind, "clean", "EXE=.exe")
    told = (f"-DCMAKE_TOOLCHAIN_FILE={TOOLCHAIN}", "-DCMAKE_CROSSCOMPILING_EMULATOR=wine")
    run(ENV, "cmake", "-S", kind, "-B", tmp_path, *told)
    run(ENV, "cmake", "--build", tmp_path)
    assert "100% tests passed" in run(ENV, "ctest", "--test-dir", tmp_path, env=environment)


def test_on_windows_a_package_is_not_compared_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(BackendError, match="cannot be compared with its bundle on Windows, expected POSIX"):
        find_compiler()
