"""How far a model is from itself between float32 and float64, along given segments."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from support import random_state, small_config
from txl_export.families.transformer_xl.parity import rounding
from txl_export.families.transformer_xl.parity.rounding import own_rounding
from txl_export.families.transformer_xl.reference import Reference
from txl_runtime.bundle.format1 import Dialect, ModelConfig

CONFIG = small_config()
CALLS = [
    (np.random.default_rng(number).integers(0, 60, (2, 4)).astype(np.int32), np.array(counts, np.int32))
    for number, counts in enumerate([(4, 4), (2, 0), (4, 3)])
]


def reference(larger: dict[str, float], dtype: torch.dtype = torch.float64, memory_length: int = 7) -> Reference:
    """A small model, some of its weights times a factor."""
    state = random_state(CONFIG)
    state["softmax.tables.0"] = state["embedding.tables.0"].clone()
    for name, factor in larger.items():
        state[name] *= factor
    config = msgspec.convert(
        {name: CONFIG[name] for name in ModelConfig.__struct_fields__ if name in CONFIG}, ModelConfig
    )
    dialect = Dialect(family="txl", memory_start="empty", window=None, clamp_length=None)
    return Reference(config, dialect, memory_length, state, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_says_what_rounding_does_whichever_precision_the_reference_has(dtype):
    logprobs, memory = own_rounding(reference({}, dtype), CALLS, "kv")
    assert 1e-8 < logprobs < 1e-5
    assert 1e-9 < memory < 1e-5
    steep, same = own_rounding(reference({"softmax.tables.0": 1e4}, dtype), CALLS, "kv")
    assert 1e-3 < steep < 1
    assert same == memory, "what is remembered does not depend on the softmax"


def test_memory_is_looked_at_after_the_last_segment_whatever_the_stride():
    often, seldom = (own_rounding(reference({}), CALLS, "kv", every)[1] for every in (1, 8))
    assert often >= seldom > 0


def test_a_tensor_alone_is_measured_by_its_own_values_as_the_self_test_measures_it():
    """Keys of the first layer are hundreds of times as large as those of the second."""
    model = reference({"layers.00.attention.key.weight": 300.0, "layers.00.attention.query.weight": 1 / 300})
    joint, alone = (own_rounding(model, CALLS, "kv", alone=each)[1] for each in (False, True))
    assert 5 * joint < alone < 1e-4


def test_a_model_without_memory_and_one_that_is_too_large(monkeypatch):
    assert own_rounding(reference({}, memory_length=0), CALLS, "kv")[1] == 0
    monkeypatch.setattr(rounding, "MOST_PARAMETERS", reference({}).parameters - 1)
    assert own_rounding(reference({}), CALLS, "kv") is None
