"""Graphs that leave B open: a stream computes the sequences that run, and the results are those of a fixed B.

Bundles with a fixed B are those of B 1, and those of release 0.8 (`versions/test_upgrade.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frozen import KEPT, frozen, opened
from support import Counted
from txl_runtime import Model, UsageError, load
from txl_runtime.host.loop import HostLoop
from txl_runtime.ladder import rung

LIMIT = rung("fp32", "cpu").logprobs
forms = pytest.mark.parametrize("form", [*KEPT, "int8", "int8, rolled", "fp16"])


def tokens(rows: int, columns: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 41, (rows, columns)).astype(np.int32)


def counting(model: Model) -> tuple[HostLoop, Counted]:
    backend: Any = model.backend
    engine = Counted(backend.engine)
    loop = HostLoop(model.manifest, engine, model.update, backend.programs, model._initial)
    return loop, engine


@pytest.mark.parametrize(
    ("counts", "rows"),
    [([1], [1]), ([0, 0], []), ([2, 0, 0], [1]), ([0, 3, 0], [2]), ([1, 0, 4], [3]), ([4, 4, 4], [3])],
)
def test_what_is_computed_ends_with_the_last_sequence_that_runs(counts, rows):
    loop, engine = counting(opened("ring"))
    loop.run({"tokens": tokens(len(counts), 4, 0)}, np.array(counts, np.int32))
    assert engine.rows == rows


def test_a_bundle_of_one_sequence_is_fixed():
    assert not any(program.open_batch for program in load(frozen("policy-1"), "cpu").manifest.programs)
    assert all(p.open_batch == (p.segment_length > 0) for p in opened("ring").manifest.programs)


@forms
def test_sequences_that_come_and_go_are_the_same_alone(form):
    """Different sequences run in every segment: rolled memory is then on both sides."""
    model, draws = opened(form), np.random.default_rng(3)
    b = model.batch_size
    together, alone = model.stream(), [model.stream(1) for _ in range(b)]
    for seed in range(30):
        columns = int(draws.integers(1, 5))
        ids, live = tokens(b, columns, seed), draws.random(b) < [0.9, 0.5, 0.3][:b]
        counts = np.where(live, draws.integers(1, columns + 1, b), 0)
        commit = bool(draws.random() < 0.8)
        found = together.run({"tokens": ids}, counts, commit=commit)["logprobs"]
        for row in np.flatnonzero(live):
            expected = alone[row].run({"tokens": ids[row : row + 1]}, counts[row : row + 1], commit=commit)["logprobs"]
            np.testing.assert_allclose(found[row], expected[0], rtol=0, atol=LIMIT)
        if seed % 7 == 3:
            order = draws.permutation(b)
            together.select(order)
            alone = [alone[row] for row in order]
        if seed % 7 == 5:
            row, to = draws.permutation(b)[:2]
            state = together.take(row)
            together.put(to, state)
            alone[to] = model.stream(1)
            alone[to].put(0, state)
    assert together.fill.tolist() == [int(stream.fill[0]) for stream in alone]
    for row, stream in enumerate(alone):
        for name, rows in stream.memory().items():
            theirs = together.memory()[name][row]
            close = LIMIT * max(1.0, np.abs(rows).max(initial=0))
            np.testing.assert_allclose(theirs[len(theirs) - rows.shape[1] :], rows[0], rtol=0, atol=close)


def test_more_sequences_than_the_bundle_has_are_refused():
    with pytest.raises(UsageError, match=r"batch_size is 4, expected 1 … 3; export with --batch-size"):
        opened("ring").stream(4)
