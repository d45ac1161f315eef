"""Where sequences and positions stand in the shape of a tensor: the one place that looks for "B" and "L"."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from txl_runtime.types import Array, Ids

ALL = slice(None)
T = TypeVar("T")


class Axes:
    """The axes of a tensor. An array may be NumPy's or torch's wherever it is only indexed.

    Args:
        shape: a number, "B" or "L" for each axis. "B" stands at most once.
        ahead: positions behind a segment that the tensor has besides.

    Attributes:
        shape, ahead: as they were given.
        plain: whether there is nothing but sequences and positions, [b, T].
        batch: the axis of sequences; None where all sequences share the tensor.
        positions: the axes of positions; mostly one or none. Of a state that keeps memory rows, the axis of those rows.
    """

    def __init__(self, shape: Sequence[int | str], ahead: int = 0) -> None:
        self.shape, self.ahead = tuple(shape), ahead
        self.plain = self.shape == ("B", "L")
        self.batch = self.shape.index("B") if "B" in self.shape else None
        self.positions = tuple(axis for axis, size in enumerate(self.shape) if size == "L")

    @cached_property
    def alone(self) -> Axes:
        """The axes of one sequence's part, which has no axis of sequences."""
        return Axes([size for size in self.shape if size != "B"], self.ahead)

    @cached_property
    def still(self) -> Axes:
        """The axes of what there is of one position, which has no axis of positions."""
        return Axes([size for size in self.shape if size != "L"])

    def filled(self, batch: T, positions: T) -> tuple[T | int, ...]:
        """The shape with something else in place of "B" and "L"."""
        known = {"B": batch, "L": positions}
        return tuple(known[size] if isinstance(size, str) else size for size in self.shape)

    def sizes(self, batch_size: int, length: int) -> tuple[int, ...]:
        """The shape for segments of `length` positions, with what lies ahead of them."""
        return self.filled(batch_size, length + self.ahead)

    def at(self, rows: Any = ALL, positions: Any = ALL) -> tuple[Any, ...]:
        """The index of some sequences and some positions; an axis that the tensor lacks is ignored."""
        key = [*[ALL] * len(self.shape), ...]  # with the dots a single value is an array, too
        if self.batch is not None:
            key[self.batch] = rows
        for axis in self.positions:
            key[axis] = positions
        return tuple(key)

    def window(self, first: int, end: int, rows: Any = ALL) -> tuple[Any, ...]:
        """The index of the positions first … end - 1, with what lies ahead of them."""
        return self.at(rows, slice(first, end + self.ahead))

    def length(self, array: Any) -> int:
        """T, the positions of an array without what lies ahead of them; 1 where the tensor has no positions."""
        return int(array.shape[self.positions[0]]) - self.ahead if self.positions else 1

    def one(self, array: Any, row: int) -> Any:
        """One sequence's part of an array, a view; the array itself where it is shared."""
        return array if self.batch is None else array[self.at(row)]

    def sequences(self, array: Array) -> Array:
        """A view with the sequences first and all other axes as they were; [1, ...] where the array is shared."""
        return array[None] if self.batch is None else np.moveaxis(array, self.batch, 0)

    def rows(self, array: Array) -> Array:
        """A view [b, T, ...]: the sequences first, then the positions; T is 1 where the tensor has no positions."""
        if self.batch == 0 and self.positions == (1,):  # nothing moves, and this is asked in every step
            return array
        whole = self.sequences(array)
        if not self.positions:
            return whole[:, None]
        first = self.positions[0]
        return np.moveaxis(whole, first + (self.batch is None or first < self.batch), 1)

    def from_rows(self, rows: Array) -> Array:
        """A view of [b, T, ...] in the tensor's own order of axes; of its first position where it has no positions."""
        if not self.positions:
            return np.moveaxis(rows[:, 0], 0, self.batch or 0)
        return np.moveaxis(rows, (0, 1), (self.batch or 0, self.positions[0]))

    def joined(self, parts: Sequence[Array]) -> Array:
        """The array that several sequences have together, of one part for each; the first part where it is shared."""
        if len(parts) == 1 and self.batch is not None:
            return np.expand_dims(parts[0], self.batch)  # a view: one sequence is not copied
        return parts[0] if self.batch is None else np.stack(parts, self.batch)

    def concatenated(self, parts: Sequence[Array]) -> Array:
        """The array that groups of sequences have together; that of the first group where it is shared."""
        return parts[0] if self.batch is None else np.concatenate(parts, self.batch)

    def clear_uncounted(self, array: Array, counts: Ids, value: Any = 0) -> None:
        """Write `value` where nothing counts: in idle sequences, and beyond a sequence's length and what is ahead."""
        if self.batch is None:
            return
        if not self.positions:
            array[self.at(counts == 0)] = value
            return
        ends = np.where(counts > 0, counts + self.ahead, 0) if self.ahead else counts
        for axis in self.positions:
            view = np.moveaxis(array, (self.batch, axis), (0, 1))
            view[np.arange(view.shape[1]) >= ends[:, None]] = value
