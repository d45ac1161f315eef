"""One text in parts has the result of the whole, token by token; with less warm-up it has not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import txl_runtime
from hypothesis import given
from hypothesis import strategies as st
from step_models import counting
from support import FIXTURES
from txl_runtime.errors import UsageError

from txl_deploy.corpora.parts import Parts, cut, warm_up

ALL = bool(os.environ.get("TXL_PARTS"))
SHAPES: dict[str, dict[str, Any]] = {
    "M 8, L 4, 2 layers": {"config": {"memory_length": 8}},
    "M 5, L 4, 4 layers": {"config": {"memory_length": 5, "n_layer": 4}},
    "M 3, L 8, 3 layers": {"config": {"memory_length": 3, "n_layer": 3}, "segment_length": (8, 1)},
    "M 16, L 1, 2 layers": {"config": {"memory_length": 16}, "segment_length": (1,)},
    "same_length": {"config": {"memory_length": 6, "same_length": True, "n_layer": 3}},
    "same_length, clamp": {"config": {"memory_length": 8, "same_length": True, "clamp_length": 3}},
    "clamp": {"config": {"memory_length": 6, "clamp_length": 4, "n_layer": 3}},
    "rows of zeros": {"config": {"memory_length": 6, "memory_start": "zeros", "n_layer": 3}},
    "no memory": {"config": {"memory_length": 0}},
}
TRIED = list(SHAPES) if ALL else ["M 5, L 4, 4 layers", "M 3, L 8, 3 layers", "same_length, clamp"]
"""An export takes seconds; TXL_PARTS=1 tries all."""


def plain(model: txl_runtime.Model, ids: np.ndarray) -> np.ndarray:
    return model.stream(1).score(ids[None])[0]


def in_parts(model: txl_runtime.Model, ids: np.ndarray, plan: Parts) -> np.ndarray:
    return np.concatenate([plain(model, unit.ids)[unit.skipped :] for unit in plan.units(ids.astype(np.int32))])


def compared(model: txl_runtime.Model, tokens: int, count: int, draws: int = 0) -> tuple[float, float]:
    """Largest difference from the plain run of one token's nll: with the warm-up, and without any."""
    ids = np.random.default_rng(draws).integers(model.vocab_size or 0, size=tokens)
    whole, longest = plain(model, ids), model.segment_lengths[0]
    plans = [cut(tokens - 1, count, longest, warm) for warm in (warm_up(model.manifest), 0)]
    with_it, without = (float(np.abs(in_parts(model, ids, plan) - whole).max()) for plan in plans)
    return with_it, without


@pytest.mark.parametrize("name", ["kv", "hidden", "adaptive", "zeros"])
def test_parts_of_stored_bundles_score_as_the_whole(name: str) -> None:
    model = txl_runtime.load(FIXTURES / "format1" / name, threads=1)
    with_it, without = compared(model, 203, 5)
    assert with_it <= 1e-4
    assert without > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_parts_score_as_the_whole(make_bundle: Callable[..., Path], name: str) -> None:
    model = txl_runtime.load(make_bundle(**SHAPES[name], verify=False), threads=1)
    for count, draws in ((2, 0), (7, 1), (50, 2)):
        with_it, without = compared(model, 401, count, draws)
        assert with_it <= 1e-4
        assert (without > 1e-2) == (name != "no memory")


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_nothing_before_the_warm_up_changes_a_bit_of_a_part(make_bundle: Callable[..., Path], name: str) -> None:
    """And something does that is as far as layers × M: where M is no multiple of L, that would be too little."""
    model = txl_runtime.load(make_bundle(**SHAPES[name], verify=False), threads=1)
    ids, first = np.random.default_rng(0).integers(60, size=200), 120
    whole, changed = plain(model, ids), []
    for place in range(40, first):
        other = ids.copy()
        other[place] = (ids[place] + 1) % 60
        changed.append(bool((plain(model, other)[first:] != whole[first:]).any()))
    warm, layers = warm_up(model.manifest), len(model.manifest.states) // 2 // len(model.manifest.updates)
    assert not any(changed[: first - warm - 40])
    assert any(changed[first - warm - 40 :])
    if name == "M 5, L 4, 4 layers":
        assert (layers, warm) == (4, 32)
        assert any(changed[: first - layers * model.manifest.memory_length - 40])


@given(st.integers(1, 5000), st.integers(1, 70), st.integers(1, 64), st.integers(0, 40))
def test_parts_cover_a_text_once_at_its_own_cuts(results: int, parts: int, longest: int, segments: int) -> None:
    plan = cut(results, parts, longest, segments * longest)
    ids = np.arange(results + 1, dtype=np.int32)
    units = list(plan.units(ids))
    assert len(units) == plan.count <= parts
    scored = np.concatenate([unit.ids[1 + unit.skipped :] for unit in units])
    assert (scored == ids[1:]).all()
    assert sum(unit.scored for unit in units) == results
    assert all(unit.ids[0] % longest == 0 and unit.skipped % longest == 0 for unit in units)
    assert sum(unit.length - 1 for unit in units) == results + plan.extra
    assert sum(unit.weight for unit in units) == results


def test_a_model_without_a_known_reach_is_refused_by_name(tmp_path: Path) -> None:
    model = txl_runtime.load(counting().write(tmp_path / "model.txl"))
    with pytest.raises(UsageError, match=r"this one \(own_module\) names no reach, as of recurrent"):
        warm_up(model.manifest)
