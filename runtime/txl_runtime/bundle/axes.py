"""The axes of sequences and positions in a tensor's shape; only this module looks for "B" and "L"."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from txl_runtime.types import Array, Ids

ALL = slice(None)
"""An index that takes all of an axis."""
T = TypeVar("T")


class Axes:
    """The axes of a tensor, e.g. ("B", "L", 3). Methods that only index an array accept NumPy arrays and torch tensors.

    Args:
        shape: for each axis a number, or "B" for sequences, or "L" for positions. "B" occurs at most once.
        ahead: number of look-ahead positions after the segment's own: with 8 positions and ahead 2 the axis has 10.

    Attributes:
        shape, ahead: the arguments.
        plain: whether the shape is ("B", "L").
        batch: index of the axis of sequences; None if all sequences share the tensor.
        positions: indices of the axes of positions, mostly one or none; for a memory tensor, the axis of its rows.
    """

    def __init__(self, shape: Sequence[int | str], ahead: int = 0) -> None:
        self.shape, self.ahead = tuple(shape), ahead
        self.plain = self.shape == ("B", "L")
        self.batch = self.shape.index("B") if "B" in self.shape else None
        self.positions = tuple(axis for axis, size in enumerate(self.shape) if size == "L")

    @cached_property
    def alone(self) -> Axes:
        """The same axes without "B": the axes of one sequence's part."""
        return Axes([size for size in self.shape if size != "B"], self.ahead)

    @cached_property
    def still(self) -> Axes:
        """The same axes without "L": the axes of one position."""
        return Axes([size for size in self.shape if size != "L"])

    def filled(self, batch: T, positions: T) -> tuple[T | int, ...]:
        """Return the shape with `batch` for "B" and `positions` for "L": (2, 8, 3) of ("B", "L", 3)."""
        known = {"B": batch, "L": positions}
        return tuple(known[size] if isinstance(size, str) else size for size in self.shape)

    def sizes(self, batch_size: int, length: int) -> tuple[int, ...]:
        """Return the shape for a segment of `length` positions; an axis of positions has the size length + ahead."""
        return self.filled(batch_size, length + self.ahead)

    def at(self, rows: Any = ALL, positions: Any = ALL) -> tuple[Any, ...]:
        """Return the index, for NumPy or torch, of these sequences and positions, ignoring axes that the
        tensor lacks.
        """
        # with "..." in the index, a single value comes out as an array, not as a scalar
        key = [*[ALL] * len(self.shape), ...]
        if self.batch is not None:
            key[self.batch] = rows
        for axis in self.positions:
            key[axis] = positions
        return tuple(key)

    def window(self, first: int, end: int, rows: Any = ALL) -> tuple[Any, ...]:
        """Return the index of the positions first … end - 1 and the `ahead` positions after them."""
        return self.at(rows, slice(first, end + self.ahead))

    def length(self, array: Any) -> int:
        """Return the number of positions: the size of their axis minus `ahead`; 1 if the tensor has no such axis."""
        return int(array.shape[self.positions[0]]) - self.ahead if self.positions else 1

    def one(self, array: Any, row: int) -> Any:
        """Return a view of one sequence's part of an array; the array itself if all sequences share it."""
        return array if self.batch is None else array[self.at(row)]

    def sequences(self, array: Array) -> Array:
        """Return a view with the axis of sequences first; [1, ...] if all sequences share the array."""
        return array[None] if self.batch is None else np.moveaxis(array, self.batch, 0)

    def rows(self, array: Array) -> Array:
        """Return a view [b, T, ...] with sequences and positions first, e.g. of [L, B, 3]; T is 1 without positions."""
        if self.batch == 0 and self.positions == (1,):  # a shortcut for the usual layout, because every step comes here
            return array
        whole = self.sequences(array)
        if not self.positions:
            return whole[:, None]
        first = self.positions[0]
        return np.moveaxis(whole, first + (self.batch is None or first < self.batch), 1)

    def from_rows(self, rows: Array) -> Array:
        """Return a view of rows [b, T, ...] in the tensor's order of axes; of position 0 if there are no positions.

        For example, axes ["L", "B", 8] turn rows [2, 5, 8] into [5, 2, 8].
        """
        if not self.positions:
            return np.moveaxis(rows[:, 0], 0, self.batch or 0)
        return np.moveaxis(rows, (0, 1), (self.batch or 0, self.positions[0]))

    def joined(self, parts: Sequence[Array]) -> Array:
        """Stack parts of single sequences: two [T, 3] become [2, T, 3]; for a shared tensor, return the first part."""
        if len(parts) == 1 and self.batch is not None:
            return np.expand_dims(parts[0], self.batch)  # for one sequence this is a view, which copies nothing
        return parts[0] if self.batch is None else np.stack(parts, self.batch)

    def concatenated(self, parts: Sequence[Array]) -> Array:
        """Join groups of sequences: [2, T] and [3, T] become [5, T]; for a shared tensor, return the first part."""
        return parts[0] if self.batch is None else np.concatenate(parts, self.batch)

    def clear_uncounted(self, array: Array, counts: Ids, value: Any = 0) -> None:
        """Write `value` to all positions after each sequence's count (+ ahead): counts [2, 0] keep array[0, :2]."""
        if self.batch is None:
            return
        if not self.positions:
            array[self.at(counts == 0)] = value
            return
        ends = np.where(counts > 0, counts + self.ahead, 0) if self.ahead else counts
        for axis in self.positions:
            view = np.moveaxis(array, (self.batch, axis), (0, 1))
            view[np.arange(view.shape[1]) >= ends[:, None]] = value
