"""Further forms of a Transformer-XL agree with the bundle, as those that `bench` knows do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import txl_runtime
from frozen import frozen
from torch_forms import FORMS, forms
from txl_runtime.errors import UsageError

from txl_deploy.bench.competitor import BundleCompetitor
from txl_deploy.bench.competitors.agreement import agree

pytestmark = pytest.mark.device


@pytest.mark.slow(keep=0)
@pytest.mark.filterwarnings("ignore")  # the compiler's own deprecations
@pytest.mark.parametrize("bundle", ["ring", "0.8/clusters", "zeros"])
def test_all_forms_of_a_bundle_agree_with_it(bundle: str, tmp_path: Path) -> None:
    model = txl_runtime.load(frozen(bundle), threads=1)
    ours = BundleCompetitor("bundle", model)
    makers, left_out = forms(FORMS, model, torch.get_num_threads(), tmp_path)
    assert set(makers) | set(left_out) == set(FORMS)
    assert {"torch-bhlk", "torch-compile", "torch-bf16", "onnx-hidden"} <= set(makers)
    for name, make in makers.items():
        other = make()
        found = agree(ours, other, model)
        assert other.name == name
        assert found.max_abs < 1e-3 or name == "torch-bf16"
        assert other.step_bytes(1) > 0


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
