"""Competitors compute what the reference computes, over chained segments through empty, filling and full memory."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
import txl_runtime
from frozen import frozen
from support import random_state, small_config
from txl_export.checkpoints.txl import TxlConfig
from txl_export.families.transformer_xl.family import weights_of_bundle
from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.families.transformer_xl.weights import check_weights
from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig
from txl_runtime.errors import CheckError, UsageError

from txl_deploy.bench.competitor import BundleCompetitor
from txl_deploy.bench.competitors import NAMES, competitors
from txl_deploy.bench.competitors.agreement import agree
from txl_deploy.bench.competitors.cached import KeyValue
from txl_deploy.bench.competitors.hidden import TimeFirstHidden
from txl_deploy.bench.competitors.shared_layers import Eager, SharedLayers

M, BATCH = 7, 2
LENGTHS = (4, 4, 4, 1, 1, 1, 5, 4, 1, 9, 1, 4, 4, *[1] * 12)
"""Filling, over the edge of the memory, longer than the memory, and many single tokens behind each other."""

MODELS = {
    "plain": ({}, {}),
    "no memory": ({}, {}, 0),
    "window of M": ({}, {"window": M}),
    "single steps": ({}, {"single_steps": 5}),
    "window of M + 1, clamp, pre-norm": ({"pre_lnorm": True, "final_norm": True}, {"window": 8, "clamp_length": 3}),
    "zeros attended, biases": ({"attention_bias": True, "pre_lnorm": True}, {"memory_start": "zeros"}),
    "adaptive, div_val 2": ({"cutoffs": (20, 40), "div_val": 2}, {"memory_start": "zeros"}),
    "adaptive, one table": ({"cutoffs": (20, 40)}, {}),
    "embedding projected": ({"cutoffs": (20, 40), "d_embed": 8, "activation": "gelu"}, {}),
}


def parts_of(changes: dict, dialect: dict, memory_length: int = M) -> tuple[SharedLayers, PaperModel]:
    values = small_config(**changes)
    typed = msgspec.convert(values, TxlConfig)
    config = ModelConfig(**{name: getattr(typed, name) for name in ModelConfig.__struct_fields__})
    state = check_weights(config, random_state(values), "random")
    settings = Dialect(**dialect)
    reference = PaperModel(config, settings, memory_length, state, torch.float64)
    return SharedLayers(config, settings, memory_length, state), reference


def largest_error(competitor: Eager, reference: PaperModel) -> float:
    """Return the largest error of log-probabilities, next tokens and nats, in turns, over chained segments."""
    draws, worst = np.random.default_rng(0), 0.0
    memory = reference.initial_memory(BATCH)
    for index, length in enumerate(LENGTHS):
        tokens = draws.integers(0, reference.config.vocab_size, (BATCH, length + 1), dtype=np.int32)
        expected, memory = reference(torch.from_numpy(tokens[:, :-1]), memory)
        exact = expected.numpy()
        if index % 3 == 0:
            worst = max(worst, float(np.abs(competitor.logprobs(tokens[:, :-1]) - exact).max()))
        elif index % 3 == 1:
            nats = -np.take_along_axis(exact, tokens[:, 1:, None], axis=2)[..., 0]
            worst = max(worst, float(np.abs(competitor.score(tokens) - nats).max()))
        else:
            assert competitor.next_token(tokens[:, :-1]).tolist() == exact[:, -1].argmax(-1).tolist()
    return worst


@pytest.mark.parametrize("kind", [TimeFirstHidden, KeyValue], ids=lambda kind: kind.name)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_an_eager_competitor_is_the_reference(kind: Callable[..., Eager], model: tuple) -> None:
    parts, reference = parts_of(*model)
    competitor = kind(parts, BATCH)
    assert largest_error(competitor, reference) < 2e-5
    competitor.reset()
    assert largest_error(competitor, reference) < 2e-5, "the same again after a reset"


def test_step_bytes_are_those_of_the_parameters_and_the_memory() -> None:
    parts, _ = parts_of({}, {})
    every = sum(tensor.numel() * 4 for tensor in parts.state.values())
    hidden = 2 * BATCH * M * 16 * 4
    assert TimeFirstHidden(parts, BATCH).step_bytes(1) == every + hidden
    positions = 2 * 16 * 16 * 4  # W_r of two layers, folded
    assert KeyValue(parts, BATCH).step_bytes(1) == every - positions + 2 * hidden + 2 * (M + 1) * 16 * 4


def test_all_competitors_of_a_bundle_agree_with_it() -> None:
    model = txl_runtime.load(frozen("ring"), threads=1)
    ours = BundleCompetitor("bundle", model)
    makers, left_out = competitors(NAMES, model, torch.get_num_threads())
    assert left_out == {}
    for name, make in makers.items():
        other = make()
        found = agree(ours, other, model)
        assert other.name == name
        assert found.max_abs < 1e-3
        assert other.step_bytes(1) > 0
        assert ours.stream.fill.tolist() == [6, 6, 6], "the comparison leaves full memories"


def test_another_function_is_not_timed() -> None:
    model = txl_runtime.load(frozen("ring"), threads=1)
    state = weights_of_bundle(model.bundle.file(model.manifest.weights), model.manifest)
    state["layers.01.attention.position_bias"] = state["layers.01.attention.position_bias"] * 1.5
    m = model.manifest
    wrong = KeyValue(SharedLayers(m.config, m.dialect, m.memory_length, state), m.batch_size)
    with pytest.raises(CheckError, match=r"torch-kv: differs from the bundle by max_abs .* expected at most 0.001"):
        agree(BundleCompetitor("bundle", model), wrong, model)


def test_what_cannot_run_is_said_by_name() -> None:
    model = txl_runtime.load(frozen("ring"), threads=1)
    with pytest.raises(UsageError, match="'jax', expected some of torch, torch-kv, or none"):
        competitors(("jax",), model, 1)
    family = model.manifest.transformer_xl
    config = msgspec.structs.replace(family.config, attn_type=2)
    family = msgspec.to_builtins(msgspec.structs.replace(family, config=config))
    changed = msgspec.structs.replace(model.manifest, family=family)
    makers, left_out = competitors(NAMES, SimpleNamespace(manifest=changed), 1)  # type: ignore[arg-type]
    assert makers == {}
    assert left_out == dict.fromkeys(NAMES, left_out["torch"])
    assert left_out["torch"].endswith("attn_type 0 without segment windows, this is 2")
