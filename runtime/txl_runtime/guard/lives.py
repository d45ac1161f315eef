"""How many bytes of a graph's values there are at once at most, in whatever order an engine runs the nodes.

An engine drops a value once its last reader has run, but it may run nodes in another order than the file's. What no
order changes is that a node runs behind those that it reads of. So the longest chain of such nodes is a clock: every
other node runs behind those of the chain that it depends on, and before those that depend on it, and what it returns
may be there for as long as that leaves open.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate


class Lives:
    """Nodes, in an order in which they can run."""

    def __init__(self) -> None:
        self._reads: list[Sequence[int]] = []
        self._bytes, self._values = list[int](), array("q")

    def add(self, reads: Sequence[int], size: int, values: int) -> int:
        """A node: those that it reads of, the bytes and the number of values that it returns; its own number."""
        self._reads.append(reads)
        self._bytes.append(size)
        self._values.append(values)
        return len(self._reads) - 1

    def most(self) -> tuple[int, int]:
        """Bytes, and values, that there are at once at most."""
        count = len(self._reads)
        clock, ticks = self._clock()
        first, last, until = array("q", clock), array("q", [ticks] * count), array("q", bytes(8 * count))
        for node, reads in enumerate(self._reads):
            first[node] = clock[node] or max((first[read] for read in reads), default=0)
        for node in reversed(range(count)):
            latest = clock[node] or last[node]
            until[node] = max(until[node], latest)
            for read in self._reads[node]:
                until[read] = max(until[read], latest)
                last[read] = min(last[read], clock[node] - 1 if clock[node] else latest)
        sizes, values = ([0] * (ticks + 2) for _ in range(2))
        for node in range(count):
            for sums, more in ((sizes, self._bytes[node]), (values, self._values[node])):
                sums[first[node]] += more
                sums[until[node] + 1] -= more
        return max(accumulate(sizes)), max(accumulate(values))

    def _clock(self) -> tuple[array[int], int]:
        """Of each node its place in the longest chain, from 1 on, or 0; and how long the chain is."""
        depth, before = array("q"), array("q")
        for reads in self._reads:
            deepest = max(reads, key=depth.__getitem__, default=-1)
            before.append(deepest)
            depth.append(depth[deepest] + 1 if reads else 1)
        clock = array("q", bytes(8 * len(depth)))
        ticks = max(depth, default=0)
        node = depth.index(ticks) if depth else -1
        while node >= 0:
            clock[node] = depth[node]
            node = before[node]
        return clock, ticks
