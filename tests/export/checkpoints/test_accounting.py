"""Nothing of a checkpoint is left out or filled in silently: what an importer cannot place is an error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import state_and_config as case
from support import random_state, save_checkpoint, small_config
from txl_export.checkpoints import read_checkpoint
from txl_export.checkpoints.imported import Imported
from txl_export.families.transformer_xl.settings import resolve
from txl_export.options import ExportOptions
from txl_runtime.errors import CheckpointError, UsageError


def imported(name: str, **changes: Any) -> Imported:
    state, config = case(name)
    return read_checkpoint(state, config=config | changes)[0]


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("kimiyoung/k20_adp_div1", {"cutoffs": []}, "crit.cluster_bias, crit.cluster_weight"),
        ("kimiyoung/k01_base", {"n_layer": 2}, "layers.2."),
        ("nvidia/n01_base", {"n_layer": 2}, "layers.2."),
        ("hf/h01_base", {"n_layer": 2}, "transformer.layers.2."),
        ("extra/x20_fastai_xl", {"n_layers": 1}, "0.layers.1."),
        ("extra/x10_remixl", {"n_layer": 1}, "layers.1."),
    ],
)
def test_a_config_that_leaves_tensors_out_is_refused(name: str, changes: dict[str, Any], named: str) -> None:
    imported(name)
    with pytest.raises(CheckpointError, match="would leave them out") as refusal:
        imported(name, **changes)
    assert named in str(refusal.value)


@pytest.mark.parametrize("name", ["kimiyoung/k01_base", "hf/h01_base", "nvidia/n01_base", "extra/x10_remixl"])
def test_a_tensor_nobody_knows_is_refused(name: str) -> None:
    state, config = case(name)
    with pytest.raises(CheckpointError, match=r"adapter\.weight not expected"):
        read_checkpoint(state | {"adapter.weight": torch.zeros(2)}, config=config)


@pytest.mark.parametrize(
    ("name", "missing", "changes"),
    [
        ("kimiyoung/k12_not_tied", "crit.out_layers.0.weight", {}),
        ("kimiyoung/k30_adp_div2", "crit.out_projs.0", {"tie_projs": [False, True, True, True]}),
        ("hf/h12_adp_div2", "crit.out_projs.0", {"tie_projs": [False, True, True, True]}),
        ("hf/h12_adp_div2", "crit.out_layers.1.weight", {"tie_word_embeddings": False}),
        ("nvidia/n12_adp_div2", "crit.out_layers_weights.0 is missing", {"tie_weight": False}),
    ],
)
def test_what_is_not_tied_has_to_be_there(name: str, missing: str, changes: dict[str, Any]) -> None:
    state, config = case(name)
    state.pop(missing, None)
    with pytest.raises(CheckpointError, match=missing):
        read_checkpoint(state, config=config | changes)


def test_what_is_tied_may_be_absent() -> None:
    state, config = case("kimiyoung/k01_base")
    del state["crit.out_layers.0.weight"]
    assert "softmax.tables.0" not in read_checkpoint(state, config=config)[0].weights


def test_an_option_that_overrides_the_checkpoint_says_so() -> None:
    found = imported("kimiyoung/k01_base")
    _, _, lines = resolve(found, ExportOptions(memory_length=3, same_length=True))
    assert "--memory-length overrides the checkpoint's own value: 3 instead of 8" in lines
    assert any("overrides the checkpoint's own value: True instead of False" in line for line in lines)
    assert lines[-1].endswith("--clamp-length 0")
    assert not any("overrides" in line for line in resolve(found, ExportOptions(memory_length=8))[2])


@pytest.mark.parametrize(("name", "window"), [("kimiyoung/k01_base", 8), ("hf/h01_base", 8), ("nvidia/n01_base", 9)])
def test_same_length_means_m_keys_and_one_more_in_nvidias_code(name: str, window: int) -> None:
    assert resolve(imported(name), ExportOptions(memory_length=8, same_length=True))[0].window == window


def test_a_segment_longer_than_the_learned_positions_is_refused() -> None:
    found = imported("kimiyoung/k70_attn3")
    rows = found.config.position_rows
    resolve(found, ExportOptions(segment_length=rows))
    with pytest.raises(UsageError, match=f"at most {rows}"):
        resolve(replace(found), ExportOptions(segment_length=rows + 1))


def test_parts_called_model_and_config_are_not_fastais_for_that(tmp_path) -> None:
    state, config = case("kimiyoung/k01_base")
    torch.save({"model": state, "config": config}, tmp_path / "model.pt")
    assert read_checkpoint(tmp_path / "model.pt", config=config)[0].family == "kimiyoung"


@pytest.mark.parametrize("broken", ["abc", [1], 3])
def test_a_config_that_is_no_mapping_is_refused(broken: Any, tmp_path) -> None:
    state, _ = case("extra/x20_fastai_xl")
    torch.save({"model": state, "config": broken}, tmp_path / "model.pth")
    with pytest.raises(CheckpointError, match="expected a mapping"):
        read_checkpoint(tmp_path / "model.pth")


def test_own_checkpoints_are_accounted_for_too(tmp_path) -> None:
    values = small_config()
    state = random_state(values) | {"adapter.weight": torch.zeros(2)}
    from txl_export.families.transformer_xl.weights import check_weights

    found, _ = read_checkpoint(save_checkpoint(tmp_path / "model.pt", values, state))
    with pytest.raises(CheckpointError, match=r"adapter\.weight"):
        check_weights(found.config, found.weights, "model.pt")
