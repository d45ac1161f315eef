"""Sessions that are on no row: their states in host memory, and the order in which sessions were used."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

from txl_runtime.errors import TxlError
from txl_runtime.sessions.requests import Limits
from txl_runtime.streaming.state import RowState


class Store:
    """Parked states by the names of their sessions. One thread uses it.

    Args:
        largest: bytes of a state at most, as `largest_state` says.

    Attributes:
        host_bytes: what the parked states take now, in bytes of arrays.
        lost: how many states were lost so far.
    """

    def __init__(self, limits: Limits, largest: int) -> None:
        self._limits, self._largest = limits, largest
        self._states: dict[str, RowState] = {}
        self._gone: dict[str, str] = {}
        self.host_bytes = self.lost = 0

    def capacity(self, rows: int) -> int:
        """How many sessions there may be, so that each that is not on one of the rows has room here."""
        sessions = self._limits.sessions
        return min(sessions, rows + self._limits.host_bytes // self._largest) if self._largest else sessions

    def __contains__(self, name: str) -> bool:
        return name in self._states or name in self._gone

    def park(self, name: str, state: RowState) -> None:
        """Keep a state.

        Args:
            name: of the session; what was parked under it before is dropped.
            state: it is kept as it is, and must not be written to.
        """
        self.drop(name)
        self._states[name] = state
        self.host_bytes += _nbytes(state)

    def fetch(self, name: str) -> RowState:
        """Take a state out.

        Raises:
            TxlError: it is lost. The session is unknown here afterwards.
        """
        try:
            return self.look(name)
        finally:
            self.drop(name)

    def look(self, name: str) -> RowState:
        """A state that stays here; it must not be written to.

        Raises:
            TxlError: it is lost.
            KeyError: nothing is parked under this name.
        """
        if name in self._gone:
            raise TxlError(self._gone[name])
        return self._states[name]

    def drop(self, name: str) -> None:
        """Forget a state, if there is one."""
        self._gone.pop(name, None)
        state = self._states.pop(name, None)
        if state is not None:
            self.host_bytes -= _nbytes(state)

    def lose(self, name: str, told: str) -> None:
        """Note that a state is lost; its next `fetch` says why."""
        self.drop(name)
        self.lost += 1
        self._gone[name] = told


def _nbytes(state: RowState) -> int:
    return sum(tensor.nbytes for tensor in state.tensors.values())


class Recent:
    """Names in the order of their last use.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._used = clock, OrderedDict[str, float]()

    def __iter__(self) -> Iterator[str]:
        """The least recently used first."""
        return iter(self._used)

    def touch(self, name: str) -> None:
        """The name is used now."""
        self._used[name] = self._clock()
        self._used.move_to_end(name)

    def forget(self, name: str) -> None:
        """The name is used no more."""
        self._used.pop(name, None)

    def since(self, name: str) -> float:
        """Seconds since a name was used."""
        return self._clock() - self._used[name]

    def idle(self, seconds: float) -> list[str]:
        """Names that were not used for so many seconds, the longest unused first."""
        now, found = self._clock(), list[str]()
        for name, used in self._used.items():
            if now - used <= seconds:
                break
            found.append(name)
        return found
