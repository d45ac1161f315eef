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
from txl_engines.composing import compose, whole_programs
from txl_engines.implicit import implicit_step
from txl_export.checkpoints import read_checkpoint
from txl_export.families.own_module.family import FOR_CHECKPOINTS
from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.families.transformer_xl.parity import comparing_attention
from txl_export.families.transformer_xl.parity.oracle import OracleStreams
from txl_export.families.transformer_xl.weights import check_weights
from txl_export.graphs.emulation import runnable
from txl_export.proof.parity import ParityError
from txl_runtime import UsageError
from txl_runtime.bundle.open_batch import smaller
from txl_runtime.bundle.reading import open_bundle

LIMIT = 1e-5
WITHOUT = {"verify": False, "attention": True}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "learned positions, hidden, three sequences": (
        {"attn_type": 3, "position_rows": 11, "pre_lnorm": True},
        {"batch_size": 3, "memory": "hidden"},
    ),
    "sinusoids that are added": ({"attn_type": 2}, {"memory": "hidden"}),
    "memory of zeros, pre-norm, clamp": ({"pre_lnorm": True, "memory_start": "zeros", "clamp_length": 5}, {}),
    "hidden memory of zeros": ({"memory_start": "zeros"}, {"memory": "hidden"}),
    "window": ({"same_length": True}, {"batch_size": 2}),
    "no memory": ({"memory_length": 0}, {}),
    "adaptive": ({"cutoffs": [20, 40], "div_val": 2}, {"batch_size": 2}),
}
ROUNDED = {"fp16": 5e-3, "bf16": 5e-2, "int8": 5e-2, "int4": 0.5}
"""How far small random models may look from where they did; a wrong graph is further, see `apart`."""
FIRST, *OTHERS = MODELS


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


def check(make_bundle: Any, name: str) -> None:
    config, options = MODELS[name]
    path = make_bundle(config=config, **options, **WITHOUT)
    manifest = txl_runtime.load(path).manifest
    assert manifest.attention
    reference = reference_of(small_config(**config), manifest)
    for update in manifest.updates:
        assert farthest(path, reference, update) <= LIMIT


def test_a_bundle_looks_where_the_reference_does(make_bundle):
    check(make_bundle, FIRST)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_every_kind_of_model_looks_where_its_reference_does(make_bundle, name):
    check(make_bundle, name)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ROUNDED)
def test_every_precision_can_be_looked_at_and_keeps_its_one_weight_file(make_bundle, precision):
    plain = make_bundle(config={}, precision=precision, verify=False)
    path = make_bundle(config={}, precision=precision, **WITHOUT)
    manifest = open_bundle(path).manifest
    assert (path / manifest.weights).read_bytes() == (plain / manifest.weights).read_bytes()
    reference = reference_of(small_config(), manifest)
    with runnable(path, manifest, "cpu") as place:
        assert LIMIT < farthest(place, reference, "rolled") <= ROUNDED[precision]


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


def test_engines_are_built_of_what_they_were_built_of(make_bundle):
    """Also of a smaller B, and the step that a server keeps the state of."""
    plain, path = make_bundle(config={}, verify=False), make_bundle(config={}, **WITHOUT)
    without, having = (open_bundle(place) for place in (plain, path))
    for update in ("ring", "rolled"):
        programs = whole_programs(having.manifest, update)
        assert programs == whole_programs(without.manifest, update)
        assert [compose(having, program) for program in programs] == [compose(without, program) for program in programs]
    assert implicit_step(having).data == implicit_step(without).data
    assert smaller(having.manifest, 1).programs[-1] == having.manifest.programs[-1]


@pytest.mark.slow
def test_an_export_whose_program_looks_elsewhere_fails(tmp_path, monkeypatch):
    true = OracleStreams.attention
    monkeypatch.setattr(OracleStreams, "attention", lambda self, *given: np.roll(true(self, *given), 1, axis=-1))
    values = small_config()
    with pytest.raises(ParityError, match=r"attention max abs is .*, limit 1e-05"):
        txl_export.export(random_state(values), tmp_path / "a.txl", config=values, segment_length=4, attention=True)
    assert not (tmp_path / "a.txl").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "limit"), [("fp32", 1e-5), ("int8", None)])
def test_verification_records_how_far_it_looks(make_bundle, precision, limit):
    report = txl_runtime.load(make_bundle(config={}, precision=precision, attention=True)).bundle.report()
    (gate,) = (gate for gate in report["gates"] if gate["name"] == "attention max abs")
    assert gate["limit"] == limit
    assert gate["verdict"] == ("passed" if limit else "not judged")
    assert 0 < gate["value"] <= (limit or 0.1)


def test_the_chain_of_looks_meets_every_fill_and_idle_sequences(make_bundle):
    model = txl_runtime.load(make_bundle(config=MODELS[FIRST][0], **MODELS[FIRST][1], **WITHOUT))
    stream, fills, idle, widths = model.stream(2), set(), 0, set()
    for tokens, counts in comparing_attention._calls(model, 2):
        fills |= set(stream.fill.tolist())
        idle, widths = idle + int((counts == 0).any()), widths | {tokens.shape[1]}
        stream.step(tokens, counts)
    assert {0, 7} < fills
    assert idle
    assert {1, 4} <= widths


def test_what_one_look_would_return_is_bounded(tmp_path):
    values = small_config(memory_length=60_000)
    with pytest.raises(UsageError, match=r"the attention of one segment, which --attention returns, would be 2 GB"):
        txl_export.export(random_state(values), tmp_path / "a.txl", config=values, segment_length=2000, attention=True)


def test_a_model_of_the_users_own_has_no_such_program():
    assert "attention" in FOR_CHECKPOINTS
    with pytest.raises(UsageError, match="--attention is for a checkpoint; leave it out"):
        txl_export.ExportOptions(attention=True).refuse(FOR_CHECKPOINTS, "a checkpoint")
