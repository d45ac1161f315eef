"""Where every oracle case looks: a plain computation of the paper's formulas, the reference, and the bundle.

The originals return no probabilities, so they are computed a third way (`plain_attention`) from the originals' weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import txl_runtime
from oracle import LANGUAGE_MODELS, export_case, facts_of, refuses_kv, source_of
from plain_attention import PlainModel
from support import ORACLE
from txl_export.checkpoints import read_checkpoint
from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.families.transformer_xl.settings import resolve
from txl_export.families.transformer_xl.weights import check_weights
from txl_export.options import ExportOptions

LIMIT = 1e-5
SEGMENTS = 4
BUNDLES = (
    *("extra/x01_cntxl_prompt", "extra/x10_remixl", "extra/x20_fastai_xl", "hf/h03_same_length", "hf/h12_adp_div2"),
    *("kimiyoung/k02_pre_lnorm", "kimiyoung/k50_attn1", "kimiyoung/k60_attn2_mem0"),
    *("kimiyoung/k70_attn3", "nvidia/n12_adp_div2"),
)
"""Each family, attention type and dialect once; all cases go through the reference above."""


def models_of(case: str) -> tuple[PaperModel, list[PlainModel]]:
    """The reference in float64, and a plain model for each sequence."""
    checkpoint, config, options = source_of(case)
    imported, _ = read_checkpoint(checkpoint, config=config or None)
    asked = ExportOptions(**options, segment_length=max(facts_of(case)["segs"]))
    dialect, sizes, _ = resolve(imported, asked)
    weights = check_weights(imported.config, imported.weights, case)
    reference = PaperModel(imported.config, dialect, sizes.memory_length, weights, torch.float64)
    plain = (PlainModel(weights, imported.config, dialect, sizes.memory_length) for _ in range(facts_of(case)["bsz"]))
    return reference, list(plain)


def segments_of(case: str) -> list[Any]:
    """Tokens int [b, T] of each segment, batch first."""
    facts, values = facts_of(case), dict(np.load(ORACLE / f"{case}.npz"))
    first = values["tokens/0"].shape == (facts["bsz"], facts["segs"][0])
    return [np.ascontiguousarray(values[f"tokens/{s}"] if first else values[f"tokens/{s}"].T) for s in range(SEGMENTS)]


@pytest.mark.parametrize("case", LANGUAGE_MODELS)
def test_the_reference_looks_where_the_formulas_say(case: str) -> None:
    reference, plain = models_of(case)
    memory = reference.initial_memory(len(plain))
    for tokens in segments_of(case):
        found = reference.attention(torch.from_numpy(tokens), memory)
        _, memory = reference.hidden(torch.from_numpy(tokens), memory)
        expected = np.stack([model.step(row) for model, row in zip(plain, tokens, strict=True)], axis=1)
        assert found.shape == expected.shape
        assert float(np.abs(found.numpy() - expected).max()) <= LIMIT / 10
        assert np.allclose(found.numpy().sum(-1), 1, atol=1e-12)


def farthest(case: str, memory: str, folder: Path) -> float:
    """The largest difference of a probability, over all segments: the bundle against the plain computation."""
    _, _, result = export_case(case, memory, folder, attention=True)
    stream, (_, plain), worst = txl_runtime.load(result.path).stream(), models_of(case), 0.0
    for tokens in segments_of(case):
        found = stream.attention(tokens)
        for row, model in enumerate(plain):
            expected = model.step(tokens[row])
            nothing = found.shape[-1] - expected.shape[-1]
            worst = max(worst, float(np.abs(found[:, row, ..., nothing:] - expected).max()))
            assert not found[:, row, ..., :nothing].any()
        stream.step(tokens)
    return worst


def test_a_bundle_looks_where_the_formulas_say(tmp_path: Path) -> None:
    assert farthest("hf/h01_base", "kv", tmp_path) <= LIMIT


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("case", BUNDLES)
def test_bundles_of_every_family_and_type_look_where_the_formulas_say(case: str, tmp_path: Path) -> None:
    assert farthest(case, "hidden" if refuses_kv(case) else "kv", tmp_path) <= LIMIT
