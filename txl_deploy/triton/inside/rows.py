"""Map a server's sequences to the rows of one stream.

The most recently used sequences have rows. If there are more sequences than rows, the states of all other sequences are
kept outside the stream. The server forgets a sequence that is idle for long, without telling the model. But the server
never keeps more than `most` sequences: when a sequence begins while `most` are known here, the server must have
forgotten the sequence that was idle longest.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import TYPE_CHECKING

from txl_runtime.errors import UsageError
from txl_runtime.streaming.checks import shown

if TYPE_CHECKING:
    from txl_runtime.streaming.state import RowState
    from txl_runtime.streaming.stream import Stream


class Rows:
    """The row of each sequence.

    Attributes:
        count: number of rows of the stream, which is the number of sequences that can run in one step.
    """

    def __init__(self, stream: Stream, most: int) -> None:
        self.count = stream.batch_size
        self._stream, self._most = stream, max(most, self.count)
        self._rows: dict[Hashable, int | None] = {}  # the longest idle first; None if the state is in `_aside`
        self._aside: dict[Hashable, RowState] = {}
        self._free = list(range(self.count))

    def __len__(self) -> int:
        return len(self._rows)

    def begin(self, name: Hashable, keep: Collection[Hashable] = ()) -> int:
        """Return a cleared row for a sequence that starts, or starts again.

        Args:
            name: the sequence.
            keep: sequences that must keep their rows; there must be fewer of them than rows.

        Raises:
            TxlError: the engine failed; the sequence is forgotten.
        """
        self.end(name)
        if len(self._rows) >= self._most:
            self.end(next(iter(self._rows)))
        return self._settle(name, keep, fresh=True)

    def resume(self, name: Hashable, keep: Collection[Hashable] = ()) -> int:
        """Return the row of a sequence that continues.

        Raises:
            UsageError: the sequence is unknown.
            TxlError: the engine failed; the sequence is forgotten.
        """
        if name not in self._rows:
            raise UsageError(
                f"sequence {shown(name)} is not known here, expected START with its first request; it was idle for "
                "too long or the model was started again, so start it again with what its memory should hold"
            )
        return self._settle(name, keep, fresh=False)

    def touch(self, name: Hashable) -> None:
        """Record that a sequence is used now, so that it does not count as the longest idle sequence."""
        if name in self._rows:
            self._rows[name] = self._rows.pop(name)

    def end(self, name: Hashable) -> None:
        """Forget a sequence, if it is known."""
        row = self._rows.pop(name, None)
        self._aside.pop(name, None)
        if row is not None:
            self._free.append(row)

    def _settle(self, name: Hashable, keep: Collection[Hashable], fresh: bool) -> int:
        """Put a sequence's state into a row and return the row; this makes it the most recently used sequence.

        If anything fails in the middle, the row's content is unknown: the row becomes free, and the sequence is
        forgotten.
        """
        row = self._rows[name] = self._rows.pop(name, None)
        try:
            # move to a lower row, because a step computes all rows up to the last live row
            if row is not None and self._free and min(self._free) < row:
                self._aside[name] = self._stream.take(row)
                self._free.append(row)
                row = self._rows[name] = None
            if row is None:
                row = self._rows[name] = self._vacated(keep)
                if fresh:
                    self._stream.reset([row])
                else:
                    self._stream.put(row, self._aside.pop(name))
        except BaseException:
            self.end(name)
            raise
        return row

    def _vacated(self, keep: Collection[Hashable]) -> int:
        """Return the first free row, else the row of the longest idle sequence, whose state is kept in `_aside`."""
        if self._free:
            row = min(self._free)
            self._free.remove(row)
            return row
        name, row = next((name, row) for name, row in self._rows.items() if row is not None and name not in keep)
        self._aside[name] = self._stream.take(row)
        self._rows[name] = None
        return row
