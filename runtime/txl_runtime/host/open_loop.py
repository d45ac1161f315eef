"""The loop on the CPU of graphs that leave B open: a segment is computed up to the last sequence that is not idle.

Rolled memory then is on one side for some sequences and on the other one for others. One that is to run beside a
sequence of the other side is copied there before: at most once for each time that it was left out.
"""

from __future__ import annotations

import numpy as np

from txl_runtime.host.loop import HostLoop
from txl_runtime.host.memory import RolledMemory
from txl_runtime.streaming.memory import Counters
from txl_runtime.types import Ids


class OpenHostLoop(HostLoop):
    """See `HostLoop`."""

    leading = True

    def computed(self, counts: Ids) -> int:
        """How many sequences a segment is computed for, from the first on; their memory is on one side after this."""
        live = counts.nonzero()[0]
        rows = int(live[-1]) + 1 if len(live) else 1
        if isinstance(self.memory, RolledMemory):
            join(self.memory, self.counters, rows)
        return rows


def join(memory: RolledMemory, counters: Counters, rows: int) -> None:
    """Bring the first sequences to one side, the first one's. A sequence's state is the same before and after."""
    sides = counters.sides[:rows]
    if max(sides.tolist()) != min(sides.tolist()):  # numpy takes longer over so few
        for row in np.flatnonzero(sides != sides[0]).tolist():
            for name, array in memory.sides[int(sides[0])].items():
                array[row] = memory.sides[int(sides[row])][name][row]
            sides[row] = sides[0]
