"""Map the requests of each correlation id to sessions.

START and END separate the requests before them from the requests after them, even while earlier requests still run. So
each part has a session of its own, and the end of one part never affects the next part.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import count
from typing import Any, Literal

from txl_runtime.sessions import Sessions

ROOM = 2048
"""Number of remembered ids at which ids of expired sessions are forgotten."""


def id_of(request: Any) -> str:
    """Return a request's correlation id as text: a number as "id 7", a name as "name x"; "" if it has none."""
    name = request.correlation_id()
    return f"{'id' if isinstance(name, int) else 'name'} {name}" if name else ""


def flag_of(request: Any, flag: Literal["START", "END"], server: Any) -> bool:
    """Return True if a request has the flag START or END; `server` is the module `triton_python_backend_utils`."""
    return bool(request.flags() & getattr(server, f"TRITONSERVER_REQUEST_FLAG_SEQUENCE_{flag}"))


class Conversations:
    """The sessions of all correlation ids of a model."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions, self._numbers = sessions, count(1)
        self._current: dict[str, str] = {}  # the current session of each id
        self._ended: dict[str, str] = {}  # the id of each session that will be closed when nothing runs in it

    def session_of(self, name: str, start: bool) -> str:
        """Return the name of the session in which a request runs; the session may not exist yet.

        Args:
            name: the correlation id, as text.
            start: True if the request begins a new session; running requests of this id then end as "closed".
        """
        if start:
            self.end(name)
            self.close_ended([session for session, ended in self._ended.items() if ended != name])
        session = self._current.get(name)
        if session is None or session not in self._sessions:
            if len(self._current) >= ROOM:
                self._current = {name: each for name, each in self._current.items() if each in self._sessions}
            session = self._current[name] = f"{name} #{next(self._numbers)}"
        return session

    def end(self, name: str) -> None:
        """Make the next request of an id begin a new session; the old session is closed when nothing runs in it."""
        session = self._current.pop(name, None)
        if session is not None:
            self._ended[session] = name

    def close_ended(self, running: Collection[str]) -> None:
        """Close the sessions that have ended, except those with a running request."""
        for session in self._ended.keys() - set(running):
            del self._ended[session]
            if session in self._sessions:
                self._sessions.close(session)
