"""Further forms of a Transformer-XL agree with the bundle, as those that `bench` knows do."""

from __future__ import annotations

from pathlib import Path

import pytest
import txl_runtime
from frozen import frozen
from torch_forms import forms
from txl_runtime.errors import UsageError

pytestmark = pytest.mark.device


def test_what_cannot_run_is_said_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hidden = txl_runtime.load(frozen("hidden"), threads=1)
    with pytest.raises(UsageError, match="'jax', expected some of torch, torch-kv, torch-bhlk"):
        forms(("jax",), hidden, 1, tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    makers, left_out = forms(("torch", "torch-compile", "onnx-hidden", "onnx-rolled"), hidden, 1, tmp_path)
    assert list(makers) == ["torch"]
    assert left_out == {
        "torch-compile": "torch.compile needs a C++ compiler, none of no-such-compiler was found",
        "onnx-hidden": "the bundle keeps hidden memory itself",
        "onnx-rolled": left_out["onnx-rolled"],
    }
