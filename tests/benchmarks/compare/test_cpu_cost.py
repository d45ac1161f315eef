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
