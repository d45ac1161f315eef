"""The counters of sequences: one table whatever the placements, and one assignment for a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from txl_runtime.bundle.tables import Counter, StateTensor
from txl_runtime.streaming.state import SequenceCounters, start_of

B, M, SLOTS = 3, 6, 8
RULES = {
    "replace": ["replace"],
    "rolled": ["rolled"],
    "ring": ["ring"],
    "ring and replace": ["ring", "replace"],
    "nothing": [],
}
every = pytest.mark.parametrize("rules", RULES)


def state(rule: str, **more: Any) -> StateTensor:
    slots = SLOTS if rule == "ring" else None
    return StateTensor(
        name=rule, input="in", output="out", shape=(B, 4, 2), row_axis=1, update=rule, slots=slots, **more
    )


def counters(rules: str, rows: int = M, start: int = 0, sequences: int = B) -> SequenceCounters:
    known = {} if rules == "replace" else {"fill": Counter(start=start, most=rows)}
    manifest: Any = SimpleNamespace(
        batch_size=sequences, memory_length=rows if known else 0, fresh_fill=start if known else 0, counters=known
    )
    return SequenceCounters(manifest, [state(rule) for rule in RULES[rules]])


def step(held: SequenceCounters, valid: list[int], computed: int = B) -> list[tuple[int, int]]:
    spilled: list[tuple[int, int]] = []
    held.valid[:] = valid
    held.advance(computed, lambda row, count: spilled.append((row, count)))
    return spilled


@every
def test_what_programs_read_is_the_beginning_of_one_table(rules):
    held = counters(rules)
    names = ["valid", "fill", *(["head"] if "ring" in RULES[rules] else [])]
    assert len(held.read) == len(names)
    for row, name in zip(held.read, names, strict=True):
        assert np.shares_memory(row, getattr(held, name))


@every
def test_a_step_is_one_assignment(rules):
    """Nothing that is held changes before the last line of `advance`, and then all of it does."""
    held = counters(rules)
    now = held._now

    class Watched(np.ndarray):
        assignments = 0

        def __setitem__(self, key: Any, value: Any) -> None:
            Watched.assignments += 1
            super().__setitem__(key, value)

    held._now = now.view(Watched)
    before, seen = now.copy(), []
    held.valid[:] = SLOTS - 1
    for _ in range(2):
        held.advance(B, lambda row, count: None)
    held.advance(B, lambda row, count: seen.append(now.copy()))
    assert Watched.assignments == 3
    assert not seen or len({found.tobytes() for found in seen}) == 1, "who spills sees the state before"
    assert (now.tobytes() != before.tobytes()) or not RULES[rules]


@every
def test_only_sequences_that_were_computed_change_sides(rules):
    held = counters(rules)
    two_sided = any(rule != "ring" for rule in RULES[rules])
    step(held, [1, 1, 0], 2)
    assert held.sides.tolist() == ([1, 1, 0] if two_sided else [0, 0, 0])
    step(held, [1, 0, 0], 1)
    assert held.sides.tolist() == ([0, 1, 0] if two_sided else [0, 0, 0])
    if two_sided:
        held.sides[2] = 1  # as a loop does that copies a sequence to the other side
        step(held, [1, 0, 0], 1)
        assert held.sides.tolist() == [1, 1, 1]
    assert held.side == held.sides[0]
    held.reorder(np.array([1, 0]), 1)
    assert set(held.sides.tolist()) == ({1} if two_sided else {0})


@every
def test_one_sequence_counts_as_each_of_several_does(rules):
    alone, several = counters(rules, sequences=1), counters(rules)
    alone.most[0], several.most[1] = 3, 3
    for valid in [1, 0, SLOTS - 1, SLOTS, 2, 3, 1, 1]:
        wanted = [(0, count) for row, count in step(several, [1, valid, 0]) if row == 1]
        assert step(alone, [valid], 1) == wanted
        for name in ("fill", "head", "sides"):
            assert getattr(alone, name)[0] == getattr(several, name)[1], name


@pytest.mark.parametrize("rules", [rules for rules in RULES if rules != "replace"])
def test_rows_fill_up_to_the_limit_of_each_sequence(rules):
    held = counters(rules, start=2)
    held.clear(np.arange(B))
    assert held.fill.tolist() == [2, 2, 2]
    held.most[1] = 3
    for _ in range(4):
        step(held, [2, 2, 0])
    assert held.fill.tolist() == [M, 3, 2]
    held.put(0, 9, SLOTS + 1)
    held.put(1, 9, 0)
    assert held.fill.tolist() == [M, 3, 2]
    assert held.head[0] == ("ring" in RULES[rules])


def test_what_ends_behind_a_ring_is_spilled_before_it_counts():
    held = counters("ring and replace")
    assert step(held, [7, 8, 0]) == [(1, 0)]
    assert held.head.tolist() == [7, 0, 0]
    assert step(held, [3, 0, 8]) == [(0, 2), (2, 0)]
    assert held.head.tolist() == [2, 0, 0]
    assert held.fill.tolist() == [M, M, M]
    assert counters("rolled").head.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("entry", "value", "shape"),
    [
        (state("rolled"), np.ones(2, np.float32), (1, 1, 2)),
        (state("ring"), np.float32(3) * np.ones(()), ()),
        (
            StateTensor(name="s", input="i", output="o", shape=(5, B, 4), batch_axis=1, update="replace"),
            np.ones(4),
            (5, 1, 4),
        ),
        (
            StateTensor(name="s", input="i", output="o", shape=(5, 4), batch_axis=None, update="replace"),
            np.ones(4),
            (4,),
        ),
        (
            StateTensor(name="s", input="i", output="o", shape=(B, 4, 2), row_axis=1, rows=(0, 4), update="replace"),
            np.ones(2),
            (),
        ),
        (
            StateTensor(name="s", input="i", output="o", shape=(5, B, 4), batch_axis=1, absent=True, update="replace"),
            np.ones(4),
            (),
        ),
    ],
)
def test_what_sequences_start_as_broadcasts_over_any_number_of_them(entry, value, shape):
    found = start_of(entry, value)
    assert found.shape == shape
    assert np.broadcast_to(found, entry.shape).shape == entry.shape
