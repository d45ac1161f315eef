"""A plain export with keys and values in and out computes what the bundle does, in ONNX Runtime and in OpenVINO."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import plain_exports
import pytest
import txl_runtime
from frozen import frozen
from plain_exports import OnnxRuntime
from torch_forms import forms
from txl_runtime.errors import CheckError
from txl_runtime.types import Array, Ids

from txl_deploy.bench.competitor import TokenCompetitor
from txl_deploy.bench.competitors.agreement import agree
from txl_deploy.bench.driving import random_inputs
from txl_deploy.bench.works import Works

pytestmark = pytest.mark.device


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.mark.parametrize(("form", "name"), [("ring", "onnx-kv"), ("clusters", "onnx-kv"), ("ring", "openvino")])
def test_it_agrees_with_the_bundle_until_its_memory_is_full_and_after(folder: Path, form: str, name: str) -> None:
    works = Works(txl_runtime.load(frozen(form), threads=1))
    makers, left_out = forms((name,), works.model, 1, folder / form)
    if left_out:
        pytest.skip(left_out[name])
    other = makers[name]()
    assert isinstance(other, TokenCompetitor)
    assert agree(works.ours, other, works.model).max_abs < 1e-4
    for seed in range(3):  # with clusters, some of these words are in the tails
        (tokens,) = random_inputs(works.model.manifest, works.tasks[-1].segment_length + 1, seed).values()
        np.testing.assert_allclose(other.score(tokens), works.ours.score(tokens), rtol=0, atol=1e-4)
    files = {path.name.partition("-")[0] for path in (folder / form / "plain").iterdir()}
    assert files == {"distribution", "greedy", "nats"}


def test_keys_and_values_that_are_not_fed_back_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works = Works(txl_runtime.load(frozen("ring"), threads=1))
    call = OnnxRuntime.call

    def forgetful(self: OnnxRuntime, tokens: Ids) -> Array:
        kept = self.memory
        answer = call(self, tokens)
        self.memory = kept
        return answer

    monkeypatch.setattr(OnnxRuntime, "call", forgetful)
    other = forms(("onnx-kv",), works.model, 1, folder / "ring")[0]["onnx-kv"]()
    with pytest.raises(CheckError, match=r"onnx-kv: differs from the bundle by max_abs"):
        agree(works.ours, other, works.model)


def test_openvino_is_left_out_where_it_is_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_exports.importlib.util, "find_spec", lambda name: None)
    makers, left_out = forms(("onnx-kv", "openvino"), txl_runtime.load(frozen("ring"), threads=1), 1, folder)
    assert list(makers) == ["onnx-kv"]
    assert left_out == {"openvino": "OpenVINO is not installed: pip install openvino"}
    assert not plain_exports.emulates_bf16()
