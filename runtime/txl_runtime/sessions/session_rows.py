"""The sessions on the rows of a stream, and functions that move sessions' states to and from rows."""

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
    """The rows of a stream and the sessions on them. States move to and from rows as `RowState`.

    Args:
        stream: a stream that nobody else uses.

    Attributes:
        owners: the session on each row; None for a free row.
        torn: True if an interrupt left a state half replaced: no state on the rows is valid then.
    """

    def __init__(self, stream: Stream, manifest: Manifest, update: str, store: Store, counters: Counters) -> None:
        self._stream, self._manifest, self._table = stream, manifest, manifest.states_of(update)
        self._store, self._counters = store, counters
        self.owners: list[Session | None] = [None] * stream.batch_size
        self.torn = False
        self._used = [False] * stream.batch_size  # for each row, whether it may hold a state that must be cleared
        stream.reset()
        self._fresh = stream.take(0)

    def give(self, session: Session, row: int) -> None:
        """Put a session on a free row.

        Raises:
            TxlError: the session's state is lost, or the engine failed and the state stays parked.
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
        """Take a session from its row and park its state.

        Raises:
            TxlError: the engine failed; the session stays on its row.
        """
        assert session.row is not None
        if not session.fresh:
            state = self._stream.take(session.row)
            session.fill = state.fill
            self._store.park(session.key, state)
            self._counters.parked += 1
        self.leave(session)

    def move(self, session: Session, row: int) -> None:
        """Move a session from its row to `row`; a session that is on `row` moves to the row that becomes free.

        Raises:
            TxlError: the engine failed; both sessions stay on their rows.
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
        """Free a session's row, if it has one. The row's state is cleared or replaced when the next session gets the
        row.
        """
        if session.row is not None:
            self.owners[session.row] = None
            session.row = None

    def clear(self, session: Session) -> None:
        """Free a session's row, if it has one, and clear the state there."""
        row = session.row
        self.leave(session)
        if row is not None:
            with contextlib.suppress(TxlError):  # if the reset fails, the row is cleared before its next session
                self._reset(row)
                self._used[row] = False

    def state(self, session: Session) -> SessionState:
        """Return a copy of a session's state, from its row or the store.

        Raises:
            TxlError: the state is lost.
        """
        if session.fresh:
            row: RowState = self._fresh
        elif session.row is not None:
            row = self._stream.take(session.row)
        else:
            row = _copied(self._store.look(session.key))
        return SessionState.of(row, self._manifest, self._table, session.pending, session.seen)

    def fill(self, session: Session) -> int | None:
        """Return the number of memory rows that a session has; None if the model counts none."""
        if not self._manifest.can.count_rows:
            return None
        if session.fresh:
            return self._fresh.fill
        return session.fill if session.row is None else int(self._stream.fill[session.row])

    def checked(self, state: SessionState) -> RowState:
        """Return a copy of a state after checking that it fits the model.

        Raises:
            UsageError: the state does not fit.
        """
        return _copied(state.row(self._manifest, self._table))

    def renew(self) -> None:
        """Reset the stream, and free all rows.

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
        """Replace the states on some rows; if this is interrupted, `torn` stays True."""
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
