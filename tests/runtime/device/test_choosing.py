"""Which backend `auto` takes, and what it says of the others."""

from __future__ import annotations

from typing import Any

from stand_ins.engine import open_stand_in
from txl_runtime import BackendError, BundleError, load
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.device import choosing

B = 2


def test_auto_takes_the_cpu_where_there_is_nothing_else_and_says_why(make_bundle, monkeypatch):
    monkeypatch.setattr(choosing, "_has_gpu", lambda: False)
    path = make_bundle(batch_size=B, config={})
    model = load(path)
    assert model.backend.name == "cpu"
    assert list(model.backend_notes) == ["rtx", "tensorrt", "cuda"]
    assert "txl-deploy build" in model.backend_notes["rtx"]
    assert "no usable CUDA driver" in choosing.missing("cuda", open_bundle(path), built=True)


def test_auto_takes_the_best_that_opens_and_says_why_not_the_others(make_bundle, monkeypatch):
    bundle = open_bundle(make_bundle(batch_size=B, config={}))
    monkeypatch.setattr(choosing, "DEVICES", ("rtx", "tensorrt", "next"))
    monkeypatch.setattr(choosing, "missing", lambda name, bundle: "not installed" if name == "tensorrt" else "")

    def opener(name: str, bundle: Any, update: str | None) -> Any:
        if name == "rtx":
            raise BundleError("built by version 1.6, the library here is 1.7")
        return open_stand_in(bundle, update, name)

    found, notes = choosing.choose_device(bundle, None, opener)
    assert found is not None
    assert found.name == "next"
    assert notes == {"rtx": "built by version 1.6, the library here is 1.7", "tensorrt": "not installed"}


def test_auto_takes_cuda_and_says_why_where_it_does_not_open(make_bundle, monkeypatch):
    path = make_bundle(batch_size=B, config={})
    monkeypatch.setattr(choosing, "missing", lambda name, bundle: "" if name == "cuda" else "not installed")
    found, notes = choosing.choose_device(
        open_bundle(path), None, lambda name, bundle, update: open_stand_in(bundle, update, name)
    )
    assert found is not None
    assert found.name == "cuda"
    assert list(notes) == ["rtx", "tensorrt"]

    def refused(name: str, bundle: Any, update: str | None) -> Any:
        raise BackendError("reads tokens outside of cuda")

    found, notes = choosing.choose_device(open_bundle(path), None, refused)
    assert found is None
    assert notes["cuda"] == "reads tokens outside of cuda"
