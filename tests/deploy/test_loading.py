"""Commands load a bundle in a process of their own."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from frozen import frozen

from txl_deploy import loading


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of Linux's C libraries")
@pytest.mark.parametrize("library", ["glibc", "musl"])
def test_matrices_lie_side_by_side_where_the_library_can(monkeypatch, library):
    asked: list[tuple[int, int]] = []
    known = {"mallopt": lambda *values: asked.append(values)} if library == "glibc" else {}
    monkeypatch.setattr(loading.ctypes, "CDLL", lambda _: SimpleNamespace(**known))
    assert loading.load_alone(frozen("ring"), "cpu", 1).batch_size
    assert asked == ([(-3, 2**25), (-1, 2**26)] if library == "glibc" else [])
