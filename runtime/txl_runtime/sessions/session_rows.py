"""Sessions on the rows of a stream: who is where, and how states come and go."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import TxlError
from txl_runtime.sessions.jobs import Session
from txl_runtime.sessions.requests import Counters
from txl_runtime.sessions.state import SessionState
from txl_runtime.sessions.store import Store
from txl_runtime.streaming.state import RowState
from txl_runtime.streaming.stream import Stream


class SessionRows:
    """The rows of a stream and the sessions on them. A state moves as one sequence's `RowState` alone.

    Args:
        stream: whose rows these are; nobody else uses it.

    Attributes:
        owners: the session on each row; None where there is none.
        torn: whether a state was left half replaced, so that nothing of the stream's memory can be believed.
    """

    def __init__(self, stream: Stream, manifest: Manifest, update: str, store: Store, counters: Counters) -> None:
        self._stream, self._manifest, self._table = stream, manifest, manifest.states_of(update)
        self._store, self._counters = store, counters
        self.owners: list[Session | None] = [None] * stream.batch_size
        self.torn = False
        self._used = [False] * stream.batch_size  # whether something may stand there
        stream.reset()
        self._fresh = stream.take(0)

    def give(self, session: Session, row: int) -> None:
        """Put a session on a row that is free.

        Raises:
            TxlError: its state is lost, or the engine failed. A state that is not lost is where it was.
        """
        if session.fresh:
            if self._used[row]:
                self._reset(row)
        else:
            state = self._store.fetch(session.key)
            try:
                self._put({row: state})
            except BaseException:
                self._store.park(session.key, state)
                raise
            self._counters.resumed += 1
        self._settle(session, row)

    def park(self, session: Session) -> None:
        """Take a session from its row and keep its state.

        Raises:
            TxlError: the engine failed; the session is where it was.
        """
        assert session.row is not None
        if not session.fresh:
            taken = self._stream.take(session.row)
            session.fill = taken.fill
            self._store.park(session.key, taken)
            self._counters.parked += 1
        self.leave(session)

    def move(self, session: Session, row: int) -> None:
        """Put a session that has a row on another one; whoever is there comes to its row.

        Raises:
            TxlError: the engine failed; both sessions are where they were.
        """
        assert session.row is not None
        before, owner = session.row, self.owners[row]
        states = {row: self._stream.take(before)}
        if owner is not None:
            states[before] = self._stream.take(row)
        self._put(states)
        self._used[row] = True
        self.owners[row], self.owners[before], session.row = session, owner, row
        if owner is not None:
            owner.row = before

    def leave(self, session: Session) -> None:
        """Let a session's row be free. What stands there is cleared before the next one comes, or replaced."""
        if session.row is not None:
            self.owners[session.row] = None
            session.row = None

    def clear(self, session: Session) -> None:
        """Let a session's row be free, with nothing left of what stood there."""
        row = session.row
        self.leave(session)
        if row is not None:
            with contextlib.suppress(TxlError):  # the engine failed; it is tried again before the next one comes
                self._reset(row)
                self._used[row] = False

    def state(self, session: Session) -> SessionState:
        """A copy of a session's state, wherever it is.

        Raises:
            TxlError: it is lost.
        """
        if session.fresh:
            row: RowState = self._fresh
        elif session.row is not None:
            row = self._stream.take(session.row)
        else:
            row = _copied(self._store.look(session.key))
        return SessionState.of(row, self._manifest, self._table, session.pending, session.seen)

    def fill(self, session: Session) -> int | None:
        """Memory rows of a session's state, wherever it is; None where the model counts none."""
        if not self._manifest.can.count_rows:
            return None
        if session.fresh:
            return self._fresh.fill
        return session.fill if session.row is None else int(self._stream.fill[session.row])

    def checked(self, state: SessionState) -> RowState:
        """A copy of a state that fits the model.

        Raises:
            UsageError: it does not fit.
        """
        return _copied(state.row(self._manifest, self._table))

    def renew(self) -> None:
        """Begin the stream anew, without any sessions on it.

        Raises:
            BackendError: the engine failed.
        """
        for owner in self.owners:
            if owner is not None:
                self.leave(owner)
        self._stream.reset()
        self._used = [False] * len(self.owners)
        self.torn = False

    def _put(self, states: Mapping[int, RowState]) -> None:
        """Replace what stands on some rows."""
        self.torn = True
        for row, state in states.items():
            self._stream.put(row, state)
        self.torn = False

    def _reset(self, row: int) -> None:
        self.torn = True
        self._stream.reset([row])
        self.torn = False

    def _settle(self, session: Session, row: int) -> None:
        self._used[row] = True
        self.owners[row], session.row, session.turns = session, row, 0


def _copied(row: RowState) -> RowState:
    return RowState(row.fill, row.head, {name: np.array(tensor) for name, tensor in row.tensors.items()})
