"""Parked states of sessions without a row, in host memory, and the order in which sessions were used."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

from txl_runtime.errors import TxlError
from txl_runtime.sessions.requests import Limits
from txl_runtime.streaming.state import RowState


class Store:
    """Parked states, by the keys of their sessions. Only one thread uses a store.

    Args:
        largest: largest possible size of a state in bytes, from `largest_state`.

    Attributes:
        host_bytes: bytes of the arrays of all parked states.
        lost: number of states lost so far.
    """

    def __init__(self, limits: Limits, largest: int) -> None:
        self._limits, self._largest = limits, largest
        self._states: dict[str, RowState] = {}
        self._gone: dict[str, str] = {}
        self.host_bytes = self.lost = 0

    def capacity(self, rows: int) -> int:
        """Return the maximum number of sessions: at most `Limits.sessions`, and at most rows + host_bytes // largest,
        so that each session without a row can be parked.
        """
        sessions = self._limits.sessions
        return min(sessions, rows + self._limits.host_bytes // self._largest) if self._largest else sessions

    def __contains__(self, name: str) -> bool:
        return name in self._states or name in self._gone

    def park(self, name: str, state: RowState) -> None:
        """Keep a session's state until it is fetched or dropped.

        Args:
            name: key of the session; a state that is already parked under this key is dropped.
            state: the state, which is not copied and must not be changed afterwards.
        """
        self.drop(name)
        self._states[name] = state
        self.host_bytes += _nbytes(state)

    def fetch(self, name: str) -> RowState:
        """Remove a parked state and return it; the store then has no state of this session.

        Raises:
            TxlError: the state is lost.
        """
        try:
            return self.look(name)
        finally:
            self.drop(name)

    def look(self, name: str) -> RowState:
        """Return a parked state without removing it; the caller must not change it.

        Raises:
            TxlError: the state is lost.
            KeyError: no state is parked under this key.
        """
        if name in self._gone:
            raise TxlError(self._gone[name])
        return self._states[name]

    def drop(self, name: str) -> None:
        """Remove a session's state, if there is one."""
        self._gone.pop(name, None)
        state = self._states.pop(name, None)
        if state is not None:
            self.host_bytes -= _nbytes(state)

    def lose(self, name: str, told: str) -> None:
        """Count a state as lost; its next `fetch` raises an error with the text `told`."""
        self.drop(name)
        self.lost += 1
        self._gone[name] = told


def _nbytes(state: RowState) -> int:
    return sum(tensor.nbytes for tensor in state.tensors.values())


class Recent:
    """Names of sessions, in the order of their last use.

    Args:
        clock: a function that returns seconds and never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._used = clock, OrderedDict[str, float]()

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, the least recently used first."""
        return iter(self._used)

    def touch(self, name: str) -> None:
        """Record that a name is used now."""
        self._used[name] = self._clock()
        self._used.move_to_end(name)

    def forget(self, name: str) -> None:
        """Remove a name, if it is there."""
        self._used.pop(name, None)

    def since(self, name: str) -> float:
        """Return the seconds since a name was used."""
        return self._clock() - self._used[name]

    def idle(self, seconds: float) -> list[str]:
        """Return the names that were not used for more than `seconds`, the longest unused first."""
        now, names = self._clock(), list[str]()
        for name, used in self._used.items():
            if now - used <= seconds:
                break
            names.append(name)
        return names
