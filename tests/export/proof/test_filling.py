"""When a state is full, and which whole numbers count."""

from __future__ import annotations

import numpy as np
import pytest
from txl_export.proof.filling import LAST, Filling


def after(values: list[object], fresh: object = 0.0, whole: bool = False) -> Filling:
    state = Filling(None if fresh is None else np.asarray(fresh), whole)
    for one in values:
        state.add(np.asarray(one))
    return state


def test_a_state_is_full_once_all_has_changed_that_ever_does_and_stays_so_for_as_long():
    rows = [[1.0, 0, 0], [1, 2, 0], [1, 2, 0], [1, 2, 0]]
    assert [after(rows[:count], np.zeros(3)).filling for count in range(5)] == [False, True, True, True, False]
    assert after(rows, np.zeros(3)).full_after == 2


def test_a_state_that_never_changes_is_full_and_one_that_was_absent_is_full_when_it_is_there():
    assert after([0.0] * 3).full_after == 0
    assert after([[1.0, 2.0]] * 3, fresh=None).full_after == 1


@pytest.mark.parametrize("late", [0, 3])
def test_channels_that_fire_late_are_no_rows_that_are_still_to_come(late):
    """A buffer of 4 rows and 24 channels behind a ReLU; `late` channels fire in segment 70 first."""
    draws = np.random.default_rng(0)
    values = [np.maximum(draws.standard_normal((4, 24)), 0) for _ in range(120)]
    for one in values[:70]:
        one[:, :late] = 0
    assert after(values, np.zeros((4, 24))).full_after < 10


@pytest.mark.parametrize("before", [0, 10])
def test_rows_that_come_one_by_one_are_full_with_the_last_of_them(before):
    rows = [np.arange(100) < count - before for count in range(1, 121)]
    assert after(rows, np.zeros(100)).full_after == 99 + before, "also behind an episode of ten segments"


@pytest.mark.parametrize(
    ("values", "counting"),
    [
        (range(LAST + 1), True),
        (range(LAST), False),
        (range(0, -LAST - 1, -1), True),
        ([*range(LAST + 1), 0, *range(LAST + 1)], False),
        ([*range(LAST + 1), LAST], False),
        ([1, 2, 0, *range(LAST + 4)], True),
        ([1, 2, 0, *range(LAST + 3)], False),
    ],
    ids=["up", "too few", "down", "a ring", "stays", "an episode", "a short episode"],
)
def test_a_whole_number_counts_that_changes_in_one_direction_for_long(values, counting):
    assert after(list(values), fresh=0, whole=True).counting == counting
    assert not after([float(value) for value in values]).counting, "of whole numbers alone"
