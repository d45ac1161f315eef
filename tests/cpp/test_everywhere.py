"""The runtime in C++ by every compiler, on all engines and processors: `make cpp-full`, which takes long."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from building import CLANG, CPP, ROOT, build, done

from conformance.run import FOLDER
from conformance.talking import Talk

ENGINES = [path for path in sorted((ROOT / ".engines").glob("*/onnxruntime")) if path.parent.name[0].isdigit()]
ARM = ROOT / ".engines" / "aarch64" / "onnxruntime" / "capi"
WARNED = ("-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{CPP / 'include'}")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif("TXL_CPP_FULL" not in os.environ, reason="it takes long: make cpp-full"),
]


def library(capi: Path) -> Path:
    """ONNX Runtime's library in the folder of a package."""
    (found,) = capi.glob("libonnxruntime.so*")
    return found


def listed(driver: Path, **environment: str) -> dict[str, Any]:
    """The result of the whole conformance list, of which nothing failed and nothing died."""
    command = [sys.executable, "conformance/run.py", "--driver", driver, "--json", "--silence", "600"]
    found: dict[str, Any] = json.loads(done(command, cwd=ROOT, env=os.environ | environment))
    assert {tally["failed"] for tally in found["bundles"]} == {0}
    *_, bad = found["bundles"]
    assert (bad["passed"] + bad["unsupported"], bad["died"]) == (bad["vectors"], 0)
    return found


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
@pytest.mark.parametrize("kind", ["static", "shared"])
def test_it_is_built_without_a_warning(tmp_path_factory: pytest.TempPathFactory, compiler: str, kind: str) -> None:
    options = CLANG if compiler == "clang++" else ("-DCMAKE_C_COMPILER=gcc", "-DCMAKE_CXX_COMPILER=g++")
    if kind == "shared":
        options = (*options, "-DBUILD_SHARED_LIBS=ON", "-DTXL_OPENSSL=OFF", "-DTXL_ZLIB=OFF")
    folder = build(tmp_path_factory.getbasetemp(), f"{compiler}-{kind}", options, tools=(compiler,))
    shutil.rmtree(folder)


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize(("folder", "standard"), [("tests", "c99"), ("samples", "c11")])
def test_the_header_is_c99_and_samples_are_c11(compiler: str, folder: str, standard: str) -> None:
    """Queues without locks need atomic counts, which C has from C11 on."""
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    sources = [*(CPP / folder).glob("*.c")]
    assert sources
    done([compiler, f"-std={standard}", *WARNED, *sources])


@pytest.mark.parametrize("name", ["ring", "clusters"])
def test_threads_share_a_model_without_a_race(
    tmp_path_factory: pytest.TempPathFactory, engine: Path, name: str
) -> None:
    """ONNX Runtime is not built for the sanitizer, which looks at this library's own reads and writes alone."""
    flags = "-O1 -g -fsanitize=thread"
    options = [*CLANG, "-DCMAKE_BUILD_TYPE=Debug", f"-DCMAKE_C_FLAGS={flags}", f"-DCMAKE_CXX_FLAGS={flags}"]
    folder = build(tmp_path_factory.getbasetemp(), "threads", options, tools=("clang++",))
    said = done([folder / "txl-threads", FOLDER / "bundles" / name], env=os.environ | {"TSAN_OPTIONS": "exitcode=66"})
    assert said == "8 threads found what each finds alone\n"


def test_clang_tidy_finds_nothing(tmp_path: Path) -> None:
    """The checks, and why some are not among them, are in runtime/cpp/.clang-tidy."""
    if not shutil.which("run-clang-tidy"):
        pytest.skip("clang-tidy is not installed")
    done(["cmake", "-S", CPP, "-B", tmp_path, "-G", "Ninja", *CLANG, "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"])
    done(["run-clang-tidy", "-quiet", "-p", tmp_path, rf"{CPP}/(src|samples|tests)/.*"], timeout=3000)


@pytest.mark.skipif(not ENGINES, reason="no other versions of ONNX Runtime here; make cpp-full installs them")
@pytest.mark.parametrize("package", ENGINES, ids=lambda path: path.parent.name)
def test_one_binary_keeps_the_list_on_every_engine(built: Path, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has the same engine, so that results have to be equal to the bit."""
    monkeypatch.setenv("TXL_ONNXRUNTIME", str(library(package / "capi")))
    minor = int(package.parent.name.split(".")[1])
    with Talk([str(built / "txl-driver")], 60.0) as talk:
        assert talk.ask({"do": "hello"})["ok"]["engine"] == f"ONNX Runtime {package.parent.name}"
        reply = talk.ask({"do": "load", "path": str(FOLDER / "bundles" / "ring"), "update": "ring"})
        if minor < 25:
            assert reply["kind"] == "unsupported"
            assert "ring, which needs ONNX Runtime 1.25 or newer" in reply["refused"]
        else:
            assert reply["ok"] == {"update": "ring"}
    *vectors, _ = listed(built / "txl-driver", PYTHONPATH=str(package.parent))["bundles"]
    assert [tally["name"] for tally in vectors if tally["same_bits"] is False] == []
    assert any(tally["same_bits"] for tally in vectors)


def test_it_keeps_the_list_on_aarch64(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """Cross-compiled, and run where there is a qemu-aarch64 of version 10: older ones crash in ONNX Runtime.

    Without zlib, it does not support the stored vectors of bundles before 2.1.
    """
    flags = ["-DTXL_OPENSSL=OFF", "-DTXL_ZLIB=OFF", f"-DCMAKE_TOOLCHAIN_FILE={CPP / 'tests' / 'aarch64.cmake'}"]
    tool = "aarch64-linux-gnu-g++"
    folder = build(tmp_path_factory.getbasetemp(), "aarch64", [*flags, "-DTXL_SAMPLES=OFF"], tools=(tool,))
    assert "aarch64" in done(["readelf", "-h", folder / "txl-driver"]).lower()
    qemu = os.environ.get("TXL_QEMU_AARCH64") or shutil.which("qemu-aarch64")
    found = qemu and subprocess.run([qemu, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"version (\d+)", found or "")
    if not version or int(version[1]) < 10 or not ARM.is_dir():
        pytest.skip("it was compiled; for a run qemu-aarch64 10 ($TXL_QEMU_AARCH64) and .engines/aarch64 are missing")
    started = tmp_path / "driver"
    started.write_text(f'#!/bin/sh\nexec "{qemu}" -L /usr/aarch64-linux-gnu "{folder / "txl-driver"}"\n')
    started.chmod(0o755)
    bundles = listed(started, TXL_ONNXRUNTIME=str(library(ARM)))["bundles"]
    assert sum(tally["passed"] for tally in bundles) >= 600
