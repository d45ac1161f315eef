"""How far a model is from itself between float32 and float64, along given segments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from support import random_state, small_config
from txl_export.families.transformer_xl.parity import oracle
from txl_export.families.transformer_xl.parity.oracle import Oracle
from txl_export.families.transformer_xl.reference import Reference
from txl_export.proof.rounding import rounding_of
from txl_runtime.bundle.format1 import Dialect, ModelConfig
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import open_bundle

CONFIG = small_config()
CALLS = [
    (
        {"tokens": np.random.default_rng(number).integers(0, 60, (2, 4)).astype(np.int32)},
        np.array(counts, np.int32),
    )
    for number, counts in enumerate([(4, 4), (2, 0), (4, 3)])
]


@pytest.fixture
def manifest(make_bundle: Callable[..., Path]) -> Manifest:
    return open_bundle(make_bundle(batch_size=3)).manifest


def model(larger: dict[str, float], dtype: torch.dtype = torch.float64, memory_length: int = 7) -> Oracle:
    """A small model, some of its weights times a factor."""
    state = random_state(CONFIG)
    state["softmax.tables.0"] = state["embedding.tables.0"].clone()
    for name, factor in larger.items():
        state[name] *= factor
    config = msgspec.convert(
        {name: CONFIG[name] for name in ModelConfig.__struct_fields__ if name in CONFIG}, ModelConfig
    )
    dialect = Dialect(family="txl", memory_start="empty", window=None, clamp_length=None)
    return Oracle(Reference(config, dialect, memory_length, state, dtype), "kv")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_says_what_rounding_does_whichever_precision_the_reference_has(manifest, dtype):
    logprobs, memory = rounding_of(manifest, model({}, dtype), CALLS)
    assert 1e-8 < logprobs < 1e-5
    assert 1e-9 < memory < 1e-5
    steep, same = rounding_of(manifest, model({"softmax.tables.0": 1e4}, dtype), CALLS)
    assert 1e-3 < steep < 1
    assert same == memory, "what is remembered does not depend on the softmax"


def test_a_tensor_is_measured_by_its_own_values_as_the_self_test_measures_it(manifest):
    """Keys of the first layer are hundreds of times as large as those of the second."""
    larger = {"layers.00.attention.key.weight": 30.0, "layers.00.attention.query.weight": 1 / 30}
    (_, plain), (_, alone) = (rounding_of(manifest, model(changed), CALLS) for changed in ({}, larger))
    assert plain / 2 < alone < 1e-4, "errors of other tensors are not hidden by large values"


def test_a_model_without_memory_and_one_that_is_too_large(manifest, monkeypatch):
    assert rounding_of(manifest, model({}, memory_length=0), CALLS)[1] == 0
    monkeypatch.setattr(oracle, "MOST_PARAMETERS", model({}).network.parameters - 1)
    assert rounding_of(manifest, model({}), CALLS) is None
