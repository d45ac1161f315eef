"""Sessions without a model: states that show whose they are, and what a checkpoint asks of sessions."""

from __future__ import annotations

import itertools

import numpy as np
from txl_runtime.sessions.state import SessionState
from txl_runtime.streaming.snapshot import StreamState

MODEL = "5" * 64


def plain_state(mark: float, pending: int | None = None, model_id: str = MODEL) -> SessionState:
    """A state of 64 bytes, all of them the mark."""
    rows = np.full((1, 4, 4), mark, np.float32)
    head = np.zeros(1, np.int32)
    return SessionState(StreamState(model_id, np.array([4], np.int32), {"rows": rows}, head), pending, int(abs(mark)))


def mark(state: SessionState) -> float:
    """The mark of a state, which is whole."""
    rows = state.state.memory["rows"]
    assert rows.shape == (1, 4, 4)
    assert (rows == rows[0, 0, 0]).all()
    assert state.seen == int(abs(rows[0, 0, 0]))
    return float(rows[0, 0, 0])


class PlainSessions:
    """Named states with versions; see `checkpoint.SessionVersions`."""

    def __init__(self, **marks: float) -> None:
        self._count, self.states, self._versions = itertools.count(1), dict[str, SessionState](), dict[str, int]()
        self.taken: list[str] = []
        for name, value in marks.items():
            self.put(name, plain_state(value))

    def put(self, name: str, state: SessionState) -> None:
        """A session changes, and is the one used last."""
        self.states.pop(name, None)
        self._versions.pop(name, None)
        self.states[name], self._versions[name] = state, next(self._count)

    def close(self, name: str) -> None:
        """A session ends."""
        del self.states[name], self._versions[name]

    def versions(self) -> dict[str, int]:
        """See `Kept`."""
        return dict(self._versions)

    def take(self, name: str) -> SessionState:
        """See `Kept`."""
        self.taken.append(name)
        return self.states[name]

    @property
    def marks(self) -> dict[str, float]:
        """Whose states are here."""
        return {name: mark(state) for name, state in self.states.items()}
