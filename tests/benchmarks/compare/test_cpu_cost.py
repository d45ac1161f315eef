"""The benchmark of what Python costs around a step on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cpu_cost
import numpy as np
import pytest
import txl_runtime

pytestmark = pytest.mark.device


@pytest.mark.parametrize("update", ["ring", "rolled"])
def test_every_call_runs_the_engine_that_does_nothing(make_bundle: Callable[..., Path], update: str) -> None:
    bundle = make_bundle(batch_size=1)
    real = txl_runtime.load(bundle, backend="cpu", threads=1, update=update)
    model = cpu_cost.opened(txl_runtime, bundle, update)
    assert isinstance(model.backend.engine, cpu_cost.NoEngine)
    found = cpu_cost.works(model)
    assert list(found) == ["Loop.run", "Stream.run", "Stream.step", "Stream.feed"]
    for name, call in found.items():
        before = model.backend.engine.calls
        call()
        assert model.backend.engine.calls > before, name
    token = np.zeros((1, 1), np.int32)
    assert not model.stream().step(token).any(), "nothing was computed"
    assert real.stream().step(token).all(), "the engine of another model is not replaced"


def test_a_row_is_one_call_of_one_model_and_differences_are_taken_round_by_round() -> None:
    assert len(cpu_cost.rows()) == len(set(cpu_cost.rows())) == 15
    times = {"old": [4000.0, 6000.0, 8000.0], "new": [5000.0, 7000.0, 9000.0]}
    *_, line = cpu_cost.table({"Loop.run, ring": times}).markdown().splitlines()
    assert line.split(" | ")[1:4] == ["6.00 (5.00 … 7.00)", "7.00 (6.00 … 8.00)", "1.00 (1.00 … 1.00)"]
    alone = cpu_cost.table({"Loop.run, ring": {"new": [5000.0]}})
    assert alone.columns[1:] == ("new",)
