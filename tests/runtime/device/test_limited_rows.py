"""A limit on memory rows holds on a device as it does on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from frozen import frozen
from txl_runtime import load

B, V, K = 3, 41, 3


@pytest.mark.parametrize("update", ["ring", "rolled"])
def test_a_device_keeps_and_sees_as_few_rows(opened, update):
    device = opened(update)
    ours = device.stream(memory_length=K)
    theirs = load(frozen("ring"), "cpu", threads=1, update=update).stream(memory_length=K)
    free, draws = device.stream(), np.random.default_rng(1)
    apart = 0.0
    for number in range(16):
        columns = int(draws.integers(1, 5))
        ids, lengths = draws.integers(0, V, (B, columns)), draws.integers(0, columns + 1, B)
        found = ours.step(ids, lengths)
        np.testing.assert_allclose(found, theirs.step(ids, lengths), rtol=0, atol=2e-5)
        apart = max(apart, float(np.abs(found - free.step(ids, lengths)).max()))
        assert ours.fill.tolist() == theirs.fill.tolist()
        if number % 5 == 4:
            for stream in (ours, theirs, free):
                stream.select([1, 1, 0])
    assert ours.fill.tolist() == [K] * B
    assert apart > 0.01, "more rows are another function"
    for name, rows in theirs.memory().items():
        np.testing.assert_allclose(ours.memory()[name], rows, rtol=0, atol=2e-5)
    text = draws.integers(0, V, (B, 9))
    np.testing.assert_allclose(ours.score(text), theirs.score(text), rtol=0, atol=2e-5)
    prompt = draws.integers(0, V, (B, 3))
    drawn = [np.array([*stream.generate(prompt, 8, seed=2)]).tolist() for stream in (ours, theirs)]
    assert drawn[0] == drawn[1]
    ours.restore(free.snapshot())
    assert ours.fill.tolist() == [K] * B
