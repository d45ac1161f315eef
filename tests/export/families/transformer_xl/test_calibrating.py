"""int4 is fitted to the first part of a text, which judges nothing, and to each row of inputs once."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
import txl_export
from support import random_state, small_config
from txl_export.families.transformer_xl import calibrating
from txl_export.families.transformer_xl.building import reference_for
from txl_export.families.transformer_xl.calibrating import LANES, gather_inputs
from txl_export.families.transformer_xl.family import prepare
from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.options import ExportOptions
from verified_steps import Heard

CONFIG = {"d_model": 64, "d_embed": 64, "d_head": 32, "d_inner": 128, "n_layer": 2, "embedding_scale": 1.0}
QUERIES = "layers.00.attention.query_key_value.weight"
KEPT = ("layers.00", "layers.01.attention", "layers.01.feed_forward.inner", "layers.01.feed_forward.outer.weight")
"""Every matrix of the model's two layers."""


def drawn(count: int, seed: int = 0):
    return np.random.default_rng(seed).integers(0, 60, count).astype(np.int32)


def prepared(tokens, precision="int4", state=None, segment_length=16, keep=(), **changes):
    """A prepared export of a tiny model, and its listener."""
    config, heard = small_config(**changes), Heard()
    options = ExportOptions(config=config, segment_length=segment_length, precision=precision, keep=keep, tokens=tokens)
    return prepare(random_state(config) if state is None else state, options, heard), heard


def test_the_first_80_percent_are_fitted_to_and_the_rest_judges():
    tokens = drawn(40_000)
    model, heard = prepared(tokens)
    assert np.array_equal(model.calibration, tokens[:32_000])
    assert np.array_equal(model.text, tokens[32_000:])
    assert (
        heard.warnings[-1]
        == "int4 matrices are fitted to the text's first 32,000 tokens; the other 8,000 are left to judge"
    )
    assert model.provenance["calibration"]["sha256"] == hashlib.sha256(tokens[:32_000].tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("tokens", "said"),
    [(drawn(39_999), "the text has 39,999 tokens"), (None, "no text was given")],
    ids=["short", "none"],
)
def test_without_enough_text_int4_is_rounded_and_one_line_says_so(tokens, said):
    model, heard = prepared(tokens)
    assert model.calibration is None
    assert model.text is None or np.array_equal(model.text, tokens)
    assert "calibration" not in model.provenance
    expected = f"int4 matrices are rounded: {said}; --text or --tokens of 40,000 tokens would fit them to it"
    assert [line for line in heard.warnings if "int4" in line] == [expected]


@pytest.mark.parametrize(
    "options", [{"precision": "fp32"}, {"precision": "int8"}, {"keep": KEPT}], ids=["fp32", "int8", "all kept"]
)
def test_where_no_matrix_is_int4_the_whole_text_judges(options):
    tokens = drawn(40_000)
    model, heard = prepared(tokens, **options)
    assert model.calibration is None
    assert np.array_equal(model.text, tokens)
    assert "calibration" not in model.provenance
    assert not any("int4" in line for line in heard.warnings)


def test_one_matrix_that_is_not_kept_is_fitted():
    model, _ = prepared(drawn(40_000), keep=KEPT[:-1])
    assert model.calibration is not None


def test_every_row_of_a_lane_counts_once_for_queries_and_once_for_keys(monkeypatch):
    monkeypatch.setattr(calibrating, "READ", 130 * LANES)
    model, heard = prepared(drawn(40_000))
    tokens = drawn(130 * LANES + 40, seed=3)
    found = gather_inputs(model.builder.reference(), tokens, heard)
    assert len(found) == 8, "four matrices in each of two layers"
    starts = range(0, 132 * LANES, 132)
    read = np.concatenate([tokens[start : start + 130] for start in starts])
    weights = model.builder.weights["embedding.tables.0"].double()[torch.from_numpy(read).long()]
    rows = weights * model.builder.config.embedding_scale
    assert torch.allclose(found[QUERIES], 2 * rows.T @ rows, rtol=1e-12)


def test_a_bundle_of_single_tokens_is_fitted_to_whole_segments(monkeypatch, tmp_path):
    monkeypatch.setattr(calibrating, "READ", 130 * LANES)
    model, _ = prepared(drawn(40_000), segment_length=1)
    widths, hidden = [], PaperModel.hidden

    def counted(self, tokens, memory):
        widths.append(tokens.shape[1])
        return hidden(self, tokens, memory)

    monkeypatch.setattr(PaperModel, "hidden", counted)
    model.write(tmp_path, Heard())
    assert widths == [64, 64, 2]


def test_matrices_that_met_nan_are_rounded_and_told(monkeypatch):
    monkeypatch.setattr(calibrating, "READ", 800)
    config = small_config()
    state = random_state(config)
    state["layers.00.feed_forward.inner.weight"][3, 5] = torch.nan
    model, heard = prepared(drawn(40_000))
    reference = reference_for(model.builder.config, model.builder.dialect, 7, state)
    found = gather_inputs(reference, drawn(1000), heard)
    fine = {QUERIES, *(f"layers.00.{name}.weight" for name in ("attention.output", "feed_forward.inner"))}
    assert set(found) == fine
    expected = "layers.00.feed_forward.outer.weight and 4 others met infinity or NaN in the text; they are rounded"
    assert heard.warnings[-1] == expected


def gentle(seed: int = 0):
    """Random weights of a tame model: one whose output is not decided by the last bit of a weight."""
    state = random_state(small_config(**CONFIG), seed)
    return {name: value if name.endswith("norm.weight") else value * 0.4 for name, value in state.items()}


@pytest.mark.slow
def test_gates_and_page_read_the_rest_alone_and_two_exports_are_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrating, "READ", 800)
    rest = drawn(400, seed=9)
    texts = {"one": drawn(1600, seed=1), "other": drawn(1600, seed=2)}
    config = small_config(**CONFIG)

    def export(name, text):
        options = {"segment_length": (16,), "precision": "int4", "tokens": np.concatenate([texts[text], rest])}
        return txl_export.export(gentle(), tmp_path / name, config=config, **options)

    one, again, other = export("one", "one"), export("again", "one"), export("other", "other")
    stored = [(made.path / "weights.safetensors").read_bytes() for made in (one, again, other)]
    assert stored[0] == stored[1]
    assert stored[0] != stored[2], "the first part decides the codes"
    judged = [made.parity.text for made in (one, other)]
    assert judged[0].reference_nll == judged[1].reference_nll, "the reference reads the same text"
    assert (judged[0].tokens, judged[0].behind) == (400, 1600)
    assert [chain.chain.theirs for chain in one.parity.chains] == [chain.chain.theirs for chain in other.parity.chains]
    heard = Heard()
    whole = np.concatenate([texts["one"], rest])
    found = txl_export.verify(one.path, tokens=whole, listener=heard)
    assert (found.text.tokens, found.text.behind) == (400, 1600)
    assert "int4 matrices were fitted to 1,600 tokens: the text's first; the other 400 judge" in heard.warnings
    found = txl_export.verify(one.path, tokens=whole[:1900], listener=heard)
    assert (found.text.tokens, found.text.behind) == (300, 1600)
    found = txl_export.verify(one.path, tokens=whole[:1601], listener=heard)
    assert (found.text.tokens, found.text.behind) == (1601, 0)
    assert any("the text's first, and fewer than 256 follow" in line for line in heard.warnings)
    assert not any("does not begin with all of them" in line for line in heard.warnings)
    found = txl_export.verify(one.path, tokens=whole[:1500], listener=heard)
    assert (found.text.tokens, found.text.behind) == (1500, 0)
    assert any("the text does not begin with all of them; if it holds some" in line for line in heard.warnings)
