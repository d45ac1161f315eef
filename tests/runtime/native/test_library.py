"""A file that is no step, or one of different functions, is refused in one line."""

from __future__ import annotations

import subprocess

import pytest
from native_steps import best, compiled
from txl_engines.native import find_compiler
from txl_runtime.errors import BackendError
from txl_runtime.native.library import open_library


def test_a_step_opens():
    assert open_library(compiled(best())).txl_instructions().decode() == best()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, "expected a step for this machine"),
        ("int nothing;", "undefined symbol"),
        ("int txl_version(void) {}", "txl_"),
    ],
)
def test_anything_else_is_refused(tmp_path, source, said):
    compiled(best())  # skips where there is no compiler
    path, code = tmp_path / "step.so", tmp_path / "step.c"
    path.write_text("no library")
    if source is not None:
        code.write_text(source)
        subprocess.run([*find_compiler(), "-shared", "-fPIC", code, "-o", path], check=True)
    with pytest.raises(BackendError, match=said) as refused:
        open_library(path)
    assert "build it again" in str(refused.value)
