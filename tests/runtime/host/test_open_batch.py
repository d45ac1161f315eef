"""Graphs that leave B open: a stream computes the sequences that run, and the results are those of a fixed B.

Bundles with a fixed B are those of B 1, and those of format 1 (`bundle/test_format1.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import Counted
from txl_runtime import Model, UsageError, load
from txl_runtime.host.loop import HostLoop
from txl_runtime.host.placements import Ring
from txl_runtime.ladder import rung

B, V = 4, 60
LIMIT = rung("fp32", "cpu").logprobs
FORMS: dict[str, dict[str, Any]] = {
    "ring": {},
    "rolled": {"update": "rolled"},
    "hidden": {"memory": "hidden", "update": "rolled"},
    "zeros": {"config": {"memory_start": "zeros", "pre_lnorm": True, "attention_bias": True}},
    "no memory": {"config": {"memory_length": 0}, "update": "rolled"},
    "int8": {"config": {"d_model": 32, "d_inner": 64, "d_embed": 32}, "precision": "int8"},
    "int8, rolled": {
        "config": {"d_model": 32, "d_inner": 64, "d_embed": 32},
        "precision": "int8",
        "update": "rolled",
    },
    "fp16": {"precision": "fp16"},
}
QUICK = ("ring", "rolled")
forms = pytest.mark.parametrize(
    "form", [*QUICK, *(pytest.param(f, marks=pytest.mark.slow) for f in FORMS if f not in QUICK)]
)


@pytest.fixture
def opened(make_bundle) -> Callable[..., Model]:
    """The model of a form, exported with a B."""

    def open_form(form: str, batch_size: int = B) -> Model:
        options = dict(FORMS[form])
        update, options["verify"] = options.pop("update", None), False
        return load(make_bundle(batch_size=batch_size, **options), "cpu", threads=1, update=update)

    return open_form


def tokens(rows: int, columns: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, (rows, columns)).astype(np.int32)


def counting(model: Model) -> tuple[HostLoop, Counted]:
    backend: Any = model.backend
    engine = Counted(backend.engine)
    loop = HostLoop(model.manifest, engine, model.update, backend.programs, model._initial)
    return loop, engine


@pytest.mark.parametrize(
    ("counts", "rows"),
    [([1], [1]), ([0, 0], []), ([2, 0, 0], [1]), ([0, 3, 0, 0], [2]), ([1, 0, 0, 4], [4]), ([4, 4, 4, 4], [4])],
)
def test_what_is_computed_ends_with_the_last_sequence_that_runs(opened, counts, rows):
    loop, engine = counting(opened("ring"))
    loop.run({"tokens": tokens(len(counts), 4, 0)}, np.array(counts, np.int32))
    assert engine.rows == rows


def test_a_bundle_of_one_sequence_is_fixed(opened):
    model = opened("ring", 1)
    assert not any(program.open_batch for program in model.manifest.programs)
    assert all(p.open_batch == (p.segment_length > 0) for p in opened("ring").manifest.programs)


@forms
@pytest.mark.parametrize("b", [1, 2, 3])
def test_b_sequences_get_what_they_get_beside_others(opened, form, b):
    """The others run, so that all B are computed; then each number of sequences, with some idle in the middle."""
    model = opened(form)
    few, many, draws = model.stream(b), model.stream(B), np.random.default_rng(b)
    for seed in range(14):
        columns = int(draws.integers(1, 5))
        ids, counts = tokens(B, columns, seed), draws.integers(0, columns + 1, B)
        found, expected = few.step(ids[:b], counts[:b]), many.step(ids, np.append(counts[:-1], columns))
        np.testing.assert_allclose(found, expected[:b], rtol=0, atol=LIMIT)
    for name, rows in few.memory().items():
        for row, (fill, all_rows) in enumerate(zip(few.fill, many.memory()[name], strict=False)):
            ours, theirs = (part[len(part) - fill :] for part in (rows[row], all_rows))
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=LIMIT * max(1.0, np.abs(theirs).max(initial=0)))


@forms
def test_an_open_b_gives_what_a_bundle_of_that_b_gives(opened, form):
    """For B 1, whose graphs leave nothing open."""
    one, some = opened(form, 1).stream(), opened(form).stream(1)
    for seed in range(9):
        ids = tokens(1, 1 + seed % 4, seed)
        np.testing.assert_allclose(some.step(ids), one.step(ids), rtol=0, atol=LIMIT)


@forms
def test_sequences_that_come_and_go_are_the_same_alone(opened, form):
    """Which sequences run changes with every segment: rolled memory is then on both sides."""
    model, draws = opened(form), np.random.default_rng(3)
    together, alone = model.stream(B), [model.stream(1) for _ in range(B)]
    for seed in range(30):
        columns = int(draws.integers(1, 5))
        ids, live = tokens(B, columns, seed), draws.random(B) < [0.9, 0.5, 0.3, 0.3]
        counts = np.where(live, draws.integers(1, columns + 1, B), 0)
        commit = bool(draws.random() < 0.8)
        found = together.run({"tokens": ids}, counts, commit=commit)["logprobs"]
        for row in np.flatnonzero(live):
            expected = alone[row].run({"tokens": ids[row : row + 1]}, counts[row : row + 1], commit=commit)["logprobs"]
            np.testing.assert_allclose(found[row], expected[0], rtol=0, atol=LIMIT)
        if seed % 7 == 3:
            order = draws.permutation(B)
            together.select(order)
            alone = [alone[row] for row in order]
        if seed % 7 == 5:
            row, to = draws.permutation(B)[:2]
            state = together.take(row)
            together.put(to, state)
            alone[to] = model.stream(1)
            alone[to].put(0, state)
    assert together.fill.tolist() == [int(stream.fill[0]) for stream in alone]


@forms
def test_a_state_goes_from_stream_to_stream_of_other_sizes(opened, form):
    model = opened(form)
    large, small = model.stream(B), model.stream(2)
    for seed in range(5):
        large.step(tokens(B, 4, seed))
    small.put(1, large.take(3))
    ids = tokens(B, 3, 9)
    expected = large.step(ids)[3]
    found = small.step(np.stack([ids[0], ids[3]]), [0, 3])[1]
    np.testing.assert_allclose(found, expected, rtol=0, atol=LIMIT)


@forms
def test_a_snapshot_goes_on_bit_for_bit_with_as_many_sequences(opened, form):
    stream = opened(form).stream(B)
    for seed in range(6):
        stream.step(tokens(B, 4, seed), [4, 3, 0 if seed % 2 else 2, 1])
    kept = stream.snapshot()
    ids, counts = tokens(B, 4, 50), ([4, 0, 0, 0], [2, 3, 0, 0], [1, 0, 4, 0], [4, 4, 4, 4])
    first = [stream.step(ids, some).tobytes() for some in counts]
    stream.restore(kept)
    assert [stream.step(ids, some).tobytes() for some in counts] == first


@forms
def test_nothing_reaches_a_result_from_sequences_that_are_not_computed(opened, form):
    """Their memory, their tokens and what they returned before are spoiled."""
    model = opened(form)
    clean, spoiled = model.stream(B), model.stream(B)
    for seed in range(4):
        for stream in (clean, spoiled):
            stream.step(tokens(B, 4, seed))
    for held in _arrays(spoiled.loop):
        held[2:] = np.nan
    for _, returned in spoiled.loop._arrays.values():
        for array in returned.values():
            array[...] = np.nan
    for seed in range(10, 14):
        ids = tokens(B, 3, seed)
        ours, theirs = (stream.step(ids, [3, seed % 3, 0, 0]) for stream in (spoiled, clean))
        assert ours.tobytes() == theirs.tobytes()
        result = spoiled.loop.run({"tokens": ids}, np.array([2, 0, 0, 0], np.int32), commit=False)
        assert np.isfinite(result.rows()[2:]).all(), "what is not computed is zero"
    for name, rows in spoiled.memory().items():
        assert rows[:2].tobytes() == clean.memory()[name][:2].tobytes()


def _arrays(loop: HostLoop) -> list[np.ndarray]:
    found: list[Any] = []
    for placement in loop.placements:
        ring = isinstance(placement, Ring)
        found += [*placement.all] if ring else [array for side in placement.sides for array in side.values()]
    return found


def test_more_sequences_than_the_bundle_has_are_refused(opened):
    with pytest.raises(UsageError, match=r"batch_size is 5, expected 1 … 4; export with --batch-size"):
        opened("ring").stream(B + 1)
