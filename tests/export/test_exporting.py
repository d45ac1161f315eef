"""The export of a model that nothing can judge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import txl_export
from safetensors.numpy import load_file
from support import random_state, small_config
from torch import Tensor, nn
from txl_export import exporting
from txl_export.families.own_module.spec import InputSpec, StateSpec, StepSpec
from txl_export.families.transformer_xl import building
from txl_runtime.bundle.reading import SELFTEST
from txl_runtime.errors import CheckError
from txl_runtime.listener import Silent


class _Sums(nn.Module):
    """The sum of all that was read."""

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return x + h, x + h


class _Waves(nn.Module):
    """Float32 does not say where such short waves stand."""

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return x + 5e-4 * torch.sin((x + h[:, None]) * (1e9 / 3)), h + x[:, -1]


def test_the_self_test_of_a_model_that_is_far_from_itself_says_so(tmp_path: Path) -> None:
    spec = StepSpec(_Waves(), [InputSpec("x", ("B", "L", 4))], [StateSpec("h", ("B", 4))], ["y"])
    with pytest.raises(
        CheckError, match=r"so is the model from itself, .*; it amplifies rounding: look whether its weights"
    ):
        txl_export.export(spec, tmp_path / "waves.txl", batch_size=1, segment_length=1, verify=False)
    assert not (tmp_path / "waves.txl").exists()


def _steep() -> dict[str, Tensor]:
    """Weights whose logits are tens of thousands: float32 has no digits for what the limits ask for."""
    state = random_state(small_config())
    return state | {"softmax.tables.0": 1e4 * state["embedding.tables.0"]}


@pytest.mark.slow
def test_a_verification_of_a_transformer_xl_says_so_too(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match=r"log-probs max abs is .* from itself in the same segments: it amplifies"):
        txl_export.export(_steep(), tmp_path / "m", config=small_config(), segment_length=2)


@pytest.mark.slow
@pytest.mark.parametrize(("verify", "said"), [(False, "self-test failed on"), (True, "see the table, and report")])
def test_a_fault_is_not_told_as_the_rounding_of_a_model(tmp_path: Path, monkeypatch, verify: bool, said: str) -> None:
    """The very same model, and one wrong weight in what its graphs read."""
    fold = building.fold

    def wrong(*given: object) -> dict[str, Tensor]:
        folded = fold(*given)
        return folded | {"layers.01.feed_forward.inner.bias": 1.5 * folded["layers.01.feed_forward.inner.bias"]}

    monkeypatch.setattr(building, "fold", wrong)
    with pytest.raises(CheckError, match=said) as raised:
        txl_export.export(_steep(), tmp_path / "m", config=small_config(), segment_length=2, verify=verify)
    assert "amplifies" not in str(raised.value)


@pytest.mark.slow
def test_two_exports_of_one_model_are_the_same_to_the_byte(tmp_path: Path) -> None:
    """The report and the page as well, which say nothing that differs from run to run."""
    one, other = tmp_path / "one" / "model.txl", tmp_path / "other" / "model.txl"
    state = random_state(small_config())
    for path in (one, other):
        path.parent.mkdir()
        txl_export.export(state, path, config=small_config(), segment_length=(4, 1))
    assert {file.name: file.read_bytes() for file in one.iterdir()} == {
        file.name: file.read_bytes() for file in other.iterdir()
    }


def test_an_export_without_a_listener_ends_with_its_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = StepSpec(_Sums(), [InputSpec("x", ("B", 4))], [StateSpec("h", ("B", 4))], ["y"])
    options = {"batch_size": 2, "verify": False}
    result = txl_export.export(spec, tmp_path / "cell.txl", **options)
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"{tmp_path}/cell.txl: fp32, B 2, step-1; not verified\n")
    assert result.verdict in repr(result)
    txl_export.export(spec, tmp_path / "silent.txl", **options, listener=Silent())
    assert capsys.readouterr().err == ""


def test_vectors_are_stored_as_they_are_whatever_their_order_in_memory(tmp_path):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    exporting._store({"turned": values.T, "alone": np.array(2.5)}, tmp_path)
    stored = load_file(tmp_path / SELFTEST)
    np.testing.assert_array_equal(stored["turned"], values.T)
    assert stored["alone"].shape == ()
