"""Commands load a bundle in a process of their own."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from frozen import frozen
from msgspec.structs import replace
from txl_runtime.bundle.reading import open_bundle

from txl_deploy import loading


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of Linux's C libraries")
@pytest.mark.parametrize("library", ["glibc", "musl"])
def test_matrices_lie_side_by_side_where_the_library_can(monkeypatch, library):
    asked: list[tuple[int, int]] = []
    known = {"mallopt": lambda *values: asked.append(values)} if library == "glibc" else {}
    monkeypatch.setattr(loading.ctypes, "CDLL", lambda _: SimpleNamespace(**known))
    assert loading.load_alone(frozen("ring"), "cpu", 1).batch_size
    assert asked == ([(-3, 2**25), (-1, 2**26)] if library == "glibc" else [])


def test_backends_that_were_not_built_are_one_entry_and_a_built_one_says_why_it_does_not_run():
    manifest = open_bundle(frozen("ring")).manifest
    record = next(iter(manifest.files.values()))
    built = replace(manifest, files=manifest.files | {"engines/rtx/step-1.engine": record, "native/step.so": record})
    reasons = {"rtx": "no usable driver", "tensorrt": "not installed", "cuda": "no GPU", "native": ""}
    assert loading.absent_backends(reasons, manifest) == {"not built": "rtx, tensorrt, cuda; --json says why"}
    assert loading.absent_backends(reasons, built) == {
        "not rtx": "no usable driver",
        "not built": "tensorrt, cuda; --json says why",
    }
    assert loading.absent_backends(reasons | {"native": "aarch64"}, built)["not native"] == "aarch64"
    assert loading.absent_backends({"rtx": ""}, built) == {}
