"""Fixtures of all tests of the runtime in C++: the build under the sanitizers, and Python's engine."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
from building import sanitized


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the build under the sanitizers."""
    return sanitized(tmp_path_factory.getbasetemp())


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library of the ONNX Runtime that Python has, so that results are equal to the bit."""
    (library,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so*")
    monkeypatch.setenv("TXL_ONNXRUNTIME", str(library))
    return library
