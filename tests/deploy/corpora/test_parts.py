"""One text in parts has the result of the whole, token by token; with less warm-up it has not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import txl_runtime
from frozen import frozen
from hypothesis import given
from hypothesis import strategies as st
from step_models import counting
from txl_runtime.errors import UsageError

from txl_deploy.corpora.parts import Parts, cut, warm_up


def plain(model: txl_runtime.Model, ids: np.ndarray) -> np.ndarray:
    return model.stream(1).score(ids[None])[0]


def in_parts(model: txl_runtime.Model, ids: np.ndarray, plan: Parts) -> np.ndarray:
    return np.concatenate([plain(model, unit.ids)[unit.skipped :] for unit in plan.units(ids.astype(np.int32))])


@pytest.mark.parametrize("name", ["clusters", "hidden", "zeros"])
def test_parts_score_as_the_whole_and_without_the_warm_up_they_do_not(name: str) -> None:
    model = txl_runtime.load(frozen(name), threads=1)
    ids = np.random.default_rng(0).integers(41, size=203)
    whole, longest = plain(model, ids), model.segment_lengths[0]
    for warm, same in ((warm_up(model.manifest), True), (0, False)):
        largest = np.abs(in_parts(model, ids, cut(202, 5, longest, warm)) - whole).max()
        assert (largest <= 1e-4) == same


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
