"""Facts of a dialect that options override: said in one line, in the manifest, and reproduced by verify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import txl_export
import txl_runtime
from oracle import state_and_config
from support import ORACLE, random_state, small_config
from txl_export.checkpoints import read_checkpoint
from txl_export.checkpoints.overrides import Overrides, ask_overrides, recorded_overrides
from txl_export.families.transformer_xl.weights import check_weights, model_id
from txl_runtime.errors import CheckError, UsageError
from verified_steps import Heard

CLUSTERED = "kimiyoung/k30_adp_div2"


def checkpoint() -> Path:
    return ORACLE / f"{CLUSTERED}.model.zip213.pt"


def test_each_override_says_what_the_file_has_and_what_is_used() -> None:
    plain, _ = read_checkpoint(checkpoint())
    asked = Overrides(initial_memory="zeros", cluster_order="ascending", embedding_scale=1.0)
    changed, source = read_checkpoint(checkpoint(), overrides=asked)
    scale = plain.config.embedding_scale
    assert list(changed.notes[len(plain.notes) :]) == [
        "--initial-memory overrides what kimiyoung checkpoints have: zeros instead of empty",
        "--cluster-order overrides what kimiyoung checkpoints have: ascending instead of reversed",
        f"--embedding-scale overrides what kimiyoung checkpoints have: 1.0 instead of {scale}",
    ]
    assert source.overrides == asked
    assert source.overridden == {"initial_memory": "empty", "cluster_order": "reversed", "embedding_scale": scale}
    assert (changed.memory_start, changed.cluster_order, changed.config.embedding_scale) == ("zeros", "ascending", 1.0)
    for part in ("weight", "bias"):
        name = f"softmax.cluster.{part}"
        assert torch.equal(changed.weights[name], plain.weights[name].flip(0))
        assert not torch.equal(changed.weights[name], plain.weights[name])
    assert {name for name in plain.weights if not torch.equal(plain.weights[name], changed.weights[name])} == {
        "softmax.cluster.weight",
        "softmax.cluster.bias",
    }


@pytest.mark.parametrize(
    ("case", "order", "start"),
    [
        ("kimiyoung/k30_adp_div2", "reversed", "empty"),
        ("nvidia/n12_adp_div2", "reversed", "empty"),
        ("hf/h12_adp_div2", "ascending", "zeros"),
    ],
)
def test_what_a_family_has_anyway_changes_nothing(case: str, order: str, start: str) -> None:
    state, config = state_and_config(case)
    plain, _ = read_checkpoint(state, config=config)
    same = ask_overrides(start, order, plain.config.embedding_scale)
    asked, source = read_checkpoint(state, config=config, overrides=same)
    assert asked.notes == plain.notes
    assert source.overridden == {}
    assert all(torch.equal(asked.weights[name], plain.weights[name]) for name in plain.weights)
    assert (plain.cluster_order, plain.memory_start) == (order, start)


def export(folder: Path, file: Path, **options: Any) -> tuple[Path, list[str]]:
    heard = Heard()
    shape: dict[str, Any] = {"segment_length": (4, 1), "memory_length": 6, "verify": False, "listener": heard}
    return txl_export.export(file, folder / "model.txl", **shape, **options).path, heard.warnings


@pytest.mark.slow
def test_a_bundle_holds_its_overrides_and_verify_repeats_them(tmp_path: Path) -> None:
    options = {"initial_memory": "zeros", "cluster_order": "ascending", "embedding_scale": 2.0}
    path, told = export(tmp_path, checkpoint(), **options)
    assert [line.partition(" ")[0] for line in told if "overrides what" in line] == [
        "--initial-memory",
        "--cluster-order",
        "--embedding-scale",
    ]
    manifest = txl_runtime.load(path).manifest
    assert (manifest.dialect.memory_start, manifest.config.embedding_scale) == ("zeros", 2.0)
    assert manifest.provenance["source"]["overrides"] == options
    assert recorded_overrides(manifest.provenance) == Overrides(**options)
    assert txl_export.verify(path, checkpoint=checkpoint(), segments=3).passed

    imported, _ = read_checkpoint(checkpoint())
    plain = model_id(
        imported.config,
        manifest.dialect,
        manifest.memory_length,
        check_weights(imported.config, imported.weights, "k30"),
    )
    assert plain != manifest.model_id
    text = json.loads((path / "manifest.json").read_text())
    del text["provenance"]["source"]["overrides"]
    (path / "manifest.json").write_text(json.dumps(text))
    with pytest.raises(CheckError, match="verify against the checkpoint it came from"):
        txl_export.verify(path, checkpoint=checkpoint(), segments=1)


@pytest.mark.parametrize("recorded", [{"initial_memory": "ones"}, {"embedding_scale": "much"}, [1]])
def test_a_manifest_that_records_nonsense_is_refused(recorded: Any) -> None:
    with pytest.raises(UsageError, match="export the model again"):
        recorded_overrides({"source": {"overrides": recorded}})


def test_a_manifest_without_overrides_has_none() -> None:
    for provenance in ({}, {"source": None}, {"source": {"name": "model.pt"}}, {"source": {"overrides": None}}):
        assert recorded_overrides(provenance) == Overrides()


def test_a_softmax_of_one_cluster_has_no_order() -> None:
    config = small_config()
    with pytest.raises(UsageError, match="one cluster"):
        read_checkpoint(random_state(config), config=config, overrides=Overrides(cluster_order="reversed"))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (("ones", None, None), "--initial-memory is 'ones'"),
        ((None, "random", None), "--cluster-order is 'random'"),
        ((None, None, -1.0), "--embedding-scale is -1.0"),
        ((None, None, float("nan")), "--embedding-scale is nan"),
        ((None, None, "2"), "--embedding-scale is 2"),
    ],
)
def test_an_override_of_no_meaning_is_refused(values: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        ask_overrides(*values)
