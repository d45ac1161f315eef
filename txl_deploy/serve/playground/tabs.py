"""Keep track of the playground's open tabs, their sessions, and the limits of each tab.

A tab is a connection that its page keeps open. Sessions whose names begin with the tab's name are closed with the tab.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets

from txl_runtime.errors import TxlError
from txl_runtime.sessions import AsyncSessions, Sessions

from txl_deploy.serve.errors import ApiError

SESSIONS = 32
"""Maximum number of sessions of a tab at once: one for its text, and one for each state that the user keeps."""
REQUESTS = 4
"""Maximum number of unfinished requests of a tab's sessions at once."""
_OF_TAB = re.compile(r"(tab-[0-9a-f]{16})-")
"""Pattern of the names of a tab's sessions, which begin with a random number: a new tab never gets an old name."""


def of_tab(name: str) -> str | None:
    """Return the tab to which a session belongs, e.g. "tab-…" for "tab-…-text"; None if it belongs to no tab."""
    match = _OF_TAB.match(name)
    return match[1] if match else None


class Tabs:
    """The open tabs.

    Args:
        most: maximum number of tabs at once.

    Attributes:
        closing: an event that is set when all tabs must end.
    """

    def __init__(self, front: AsyncSessions, most: int) -> None:
        self._front, self._most = front, most
        self._open: set[str] = set()
        self.closing = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    def open(self) -> str:
        """Open a new tab, and return its name.

        Raises:
            ApiError: the maximum number of tabs is already open.
        """
        if len(self._open) >= self._most:
            many = "one tab of the playground is" if self._most == 1 else f"{self._most} tabs of the playground are"
            raise ApiError(
                429, f"{many} open already, the most here; close another tab first, then connect again", code="tabs"
            )
        name = f"tab-{secrets.token_hex(8)}"
        self._open.add(name)
        return name

    async def end(self, name: str) -> None:
        """Cancel a tab's requests and close its sessions. Later requests under its name are refused."""
        self._open.discard(name)
        with contextlib.suppress(TxlError):  # the server has stopped, and its sessions with it
            await self._front.call(lambda sessions: _close_all(name, sessions))

    def close(self) -> None:
        """End the connections of all tabs."""
        self.closing.set()

    def check(self, name: str | None, sessions: Sessions, asking: bool = False) -> None:
        """Refuse a session if its tab has too many sessions or requests, or has ended; accept a session without a tab.

        Args:
            name: name of the session, which need not exist yet; None for an unnamed session.
            sessions: the sessions, between two rounds, so that nothing changes between this check and the next call.
            asking: True if a request to the session follows.

        Raises:
            ApiError: the session is refused.
        """
        tab = None if name is None else of_tab(name)
        if tab is None:
            return
        if tab not in self._open:
            raise ApiError(
                409, "the tab of this session has ended, expected an open one; load the page again", code="tab"
            )
        own = _of(tab, sessions)
        if name not in sessions and len(own) >= SESSIONS:
            raise ApiError(
                429,
                f"the tab has {len(own)} sessions, the most; drop a state that you kept, then try again",
                code="tab",
            )
        infos = [sessions.info(each) for each in own] if asking else []
        if sum(info.running + info.waiting for info in infos) >= REQUESTS:
            raise ApiError(429, f"the tab has {REQUESTS} requests under way, the most; wait for one to end", code="tab")


def _of(tab: str, sessions: Sessions) -> list[str]:
    return [name for name in sessions.names() if of_tab(name) == tab]


def _close_all(tab: str, sessions: Sessions) -> None:
    for name in _of(tab, sessions):
        sessions.close(name)
