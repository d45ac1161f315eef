"""What all tests of the runtime in C++ share: the build under the sanitizers, and the engine that Python has."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnxruntime
import pytest
from building import CLANG, DEBUG, build, done


def has_fuzzer() -> bool:
    """Whether clang is here with its runtime libraries, which Debian has in a package of their own."""
    if not shutil.which("clang++"):
        return False
    return any(Path(done(["clang++", "--print-runtime-dir"]).strip()).glob("libclang_rt.fuzzer*"))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the build under the sanitizers, which takes a minute; by clang where it is, with fuzz targets."""
    clang = (*CLANG, "-DTXL_FUZZ=ON") if has_fuzzer() else ()
    return build(tmp_path_factory.getbasetemp(), "cpp", ("-DTXL_SANITIZE=ON", *DEBUG, *clang))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library of the ONNX Runtime that Python has, so that results are equal to the bit."""
    (library,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so*")
    monkeypatch.setenv("TXL_ONNXRUNTIME", str(library))
    return library
