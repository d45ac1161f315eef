"""Axes: where sequences and positions stand in a shape, and what follows from it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from txl_runtime.bundle.axes import Axes
from txl_runtime.bundle.tables import Input, Output, StateTensor

SHAPES = (
    ("B", "L", 3),
    ("L", "B", 3),
    (3, "B", 2, "L"),
    ("L", 3, "B"),
    (3, "L", "B"),
    ("B", 3),
    (3, "B"),
    ("B",),
    ("L", 3),
    (3,),
    (),
)
"""All orders, and shapes that lack one letter or both."""


def numbered(axes: Axes, batch_size: int = 4, length: int = 5) -> np.ndarray:
    """An array of these axes in which every value is another."""
    sizes = axes.sizes(batch_size, length)
    return np.arange(int(np.prod(sizes))).reshape(sizes)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_index_names_the_same_sequence_and_position_as_a_view_and_parts_are_joined_to_the_whole(shape) -> None:
    axes = Axes(shape)
    array = numbered(axes)
    rows = axes.rows(array)
    assert rows.shape[:2] == (4 if "B" in shape else 1, 5 if "L" in shape else 1)
    row, position = rows.shape[0] - 1, rows.shape[1] - 1
    assert np.array_equal(array[axes.at(row, position)], rows[row, position])
    assert np.array_equal(axes.one(array, row), axes.sequences(array)[row])
    assert isinstance(axes.one(array, row), np.ndarray)
    assert np.shares_memory(rows, array)
    assert np.shares_memory(axes.sequences(array), array)
    if "B" in shape:
        assert np.array_equal(axes.from_rows(rows), array)
    parts = [axes.one(array, row) for row in range(4)]
    assert all(part.shape == axes.alone.sizes(4, 5) for part in map(np.asarray, parts))
    assert np.array_equal(axes.joined(parts), array)
    first = axes.joined(parts[:1])
    assert first.shape == axes.sizes(1, 5)
    assert np.array_equal(axes.concatenated([first, *(axes.joined([part]) for part in parts[1:])]), array)


def test_one_sequence_is_not_copied() -> None:
    part = np.zeros((3, 5))
    assert np.shares_memory(Axes((3, "B", "L")).joined([part]), part)


def test_sizes_and_windows_hold_what_lies_ahead() -> None:
    axes = Axes(("B", 2, "L"), ahead=3)
    array = numbered(axes)
    assert array.shape == (4, 2, 8)
    assert axes.length(array) == 5
    assert array[axes.window(1, 3, slice(2, 3))].tolist() == array[2:3, :, 1:6].tolist()
    assert axes.alone.sizes(4, 5) == (2, 8)
    assert axes.filled("b", "T") == ("b", 2, "T")
    assert Axes(("B", 2)).length(np.zeros((4, 2))) == 1


def test_shapes_lose_the_axes_of_sequences_and_of_positions() -> None:
    axes = Axes(("L", 7, "B", "L"))
    assert (axes.batch, axes.positions) == (2, (0, 3))
    assert axes.alone.shape == ("L", 7, "L")
    assert axes.alone.positions == (0, 2)
    assert axes.alone.batch is None
    assert axes.still.shape == (7, "B")
    assert axes.still.batch == 1
    assert not axes.still.positions


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ahead", [0, 2])
def test_what_does_not_count_is_cleared_and_nothing_else(shape: tuple[int | str, ...], ahead: int) -> None:
    axes, counts = Axes(shape, ahead), np.array([5, 0, 1, 3], np.int32)
    array = numbered(axes) + 1
    expected = array.copy()
    for row, count in enumerate(counts.tolist() if "B" in shape else ()):
        kept = count + ahead if count else 0
        if "L" in shape:
            expected[axes.at(row, slice(kept, None))] = -7
        elif not count:
            expected[axes.at(row)] = -7
    axes.clear_uncounted(array, counts, -7)
    assert np.array_equal(array, expected)


def test_every_axis_of_positions_is_cleared() -> None:
    array = np.ones((2, 3, 3))
    Axes(("B", "L", "L")).clear_uncounted(array, np.array([2, 0], np.int32))
    assert array.sum(axis=(1, 2)).tolist() == [4, 0]


def test_rows_of_the_tables_keep_their_axes_once_they_were_asked_for() -> None:
    entry = Input(name="x", dtype="float32", shape=("L", "B"), role="feature", lookahead=2)
    assert entry.axes is entry.axes
    assert (entry.axes.batch, entry.axes.ahead) == (1, 2)
    assert entry.sizes(3, 4) == (6, 3)
    output = Output(name="y", dtype="float32", shape=("B", "L", 2))
    assert output.axes is output.axes
    assert output.sizes(3, 4) == (3, 4, 2)
    assert msgspec.structs.replace(output, shape=("L",)).axes.batch is None
    assert msgspec.json.decode(msgspec.json.encode(output), type=Output) == output


def test_memory_rows_of_a_state_stand_in_place_of_positions() -> None:
    state = StateTensor(name="s", input="i", output="o", shape=(2, 7, 4, 3), batch_axis=2, row_axis=1, update="replace")
    assert (state.axes.batch, state.axes.positions) == (2, (1,))
    assert state.axes.sizes(5, 6) == (2, 6, 5, 3)
    shared = StateTensor(name="s", input="i", output="o", shape=(2,), batch_axis=None, update="replace")
    assert (shared.axes.batch, shared.axes.positions) == (None, ())
