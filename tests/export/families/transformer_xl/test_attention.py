"""The program that tells where a model looks: it is the reference's, whatever the model, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from support import random_state, small_config
from txl_export.checkpoints import read_checkpoint
from txl_export.families.own_module.family import FOR_CHECKPOINTS
from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.families.transformer_xl.parity.oracle import OracleStreams
from txl_export.families.transformer_xl.weights import check_weights
from txl_export.proof.parity import ParityError
from txl_runtime import UsageError

LIMIT = 1e-5
WITHOUT = {"verify": False, "attention": True}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "without anything": ({}, {}),
    "learned positions, hidden, three sequences": (
        {"attn_type": 3, "position_rows": 11, "pre_lnorm": True},
        {"batch_size": 3, "memory": "hidden"},
    ),
}


def reference_of(values: dict[str, Any], manifest: Any) -> PaperModel:
    imported, _ = read_checkpoint(random_state(values), config=values)
    weights = check_weights(imported.config, imported.weights, "random")
    return PaperModel(manifest.config, manifest.dialect, manifest.memory_length, weights, torch.float64)


def farthest(place: Path, reference: PaperModel, update: str, seed: int = 0) -> float:
    """The largest |Δ| of a probability along a chain with partial segments and idle sequences; each row sums to 1."""
    model, draws, worst = txl_runtime.load(place, "cpu", update=update), np.random.default_rng(seed), 0.0
    stream, b = model.stream(), model.batch_size
    truth = OracleStreams(model.manifest, reference, b)
    for number in range(8):
        width = int(draws.integers(1, 5))
        tokens = draws.integers(0, 60, (b, width)).astype(np.int32)
        counts = draws.integers(0, width + 1, b) if number % 3 == 2 else np.full(b, width)
        counts = counts.astype(np.int32)
        found, expected = stream.attention(tokens, counts), truth.attention(tokens, counts)
        assert found.shape == expected.shape
        assert found.dtype == np.float32
        sums = np.broadcast_to((np.arange(width) < counts[:, None])[:, None], found.shape[:-1])
        assert np.abs(found.sum(-1) - sums).max() <= 1e-6
        worst = max(worst, float(np.abs(found - expected).max()))
        stream.step(tokens, counts)
        truth.step(tokens, counts)
    return worst


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_a_bundle_looks_where_the_reference_does(make_bundle, name):
    config, options = MODELS[name]
    path = make_bundle(config=config, **options, **WITHOUT)
    manifest = txl_runtime.load(path).manifest
    assert manifest.attention
    reference = reference_of(small_config(**config), manifest)
    for update in manifest.updates:
        assert farthest(path, reference, update) <= LIMIT


@pytest.mark.slow
def test_nothing_else_of_a_bundle_changes(make_bundle):
    """Every other file is the same to the byte, and so is what the manifest says."""
    plain, path = make_bundle(config={}, verify=False), make_bundle(config={}, **WITHOUT)
    files = {file.name for file in plain.iterdir()}
    assert {file.name for file in path.iterdir()} == files | {"attention.onnx"}
    for name in files - {"manifest.json", "report.html"}:
        assert (plain / name).read_bytes() == (path / name).read_bytes(), name
    without, having = (txl_runtime.load(place).manifest for place in (plain, path))
    assert not without.attention
    (added,) = (program for program in having.programs if program not in without.programs)
    assert (added.kind, added.file, added.update) == ("attention", "attention.onnx", "none")
    assert (without.segment_lengths, without.updates) == (having.segment_lengths, having.updates)


@pytest.mark.slow
def test_an_export_whose_program_looks_elsewhere_fails(tmp_path, monkeypatch):
    true = OracleStreams.attention
    monkeypatch.setattr(OracleStreams, "attention", lambda self, *given: np.roll(true(self, *given), 1, axis=-1))
    values = small_config()
    with pytest.raises(ParityError, match=r"attention max abs is .*, limit 1e-05"):
        txl_export.export(random_state(values), tmp_path / "a.txl", config=values, segment_length=4, attention=True)
    assert not (tmp_path / "a.txl").exists()


def test_what_one_look_would_return_is_bounded(tmp_path):
    values = small_config(memory_length=60_000)
    with pytest.raises(UsageError, match=r"the attention of one segment, which --attention returns, would be 2 GB"):
        txl_export.export(random_state(values), tmp_path / "a.txl", config=values, segment_length=2000, attention=True)


def test_a_model_of_the_users_own_has_no_such_program():
    assert "attention" in FOR_CHECKPOINTS
    with pytest.raises(UsageError, match="--attention is for a checkpoint; leave it out"):
        txl_export.ExportOptions(attention=True).refuse(FOR_CHECKPOINTS, "a checkpoint")
