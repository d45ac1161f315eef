"""Tabs of the playground: who is open, which sessions are theirs, and how much each may take.

A tab is a connection that its page keeps open. Sessions whose names begin with the tab's name live as long as it does.
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
"""Sessions that a tab may have at once: its text and the states that it keeps."""
REQUESTS = 4
"""Requests of a tab's sessions that may be unfinished at once."""
_OF_TAB = re.compile(r"(tab-[0-9a-f]{16})-")
"""How names of a tab's sessions begin; no tab has a name that was there before."""


def of_tab(name: str) -> str | None:
    """The tab that a session's name belongs to, or None."""
    found = _OF_TAB.match(name)
    return found[1] if found else None


class Tabs:
    """The tabs that are open.

    Args:
        most: tabs at once.

    Attributes:
        closing: is set when all tabs have to end.
    """

    def __init__(self, front: AsyncSessions, most: int) -> None:
        self._front, self._most = front, most
        self._open: set[str] = set()
        self.closing = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    def open(self) -> str:
        """The name of a new tab.

        Raises:
            ApiError: as many are open as may be.
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
        """Cancel a tab's requests and close its sessions. What arrives under its name later is refused."""
        self._open.discard(name)
        with contextlib.suppress(TxlError):  # the server has ended, and its sessions with it
            await self._front.call(lambda sessions: _close_all(name, sessions))

    def close(self) -> None:
        """Let all tabs end."""
        self.closing.set()

    def check(self, name: str | None, sessions: Sessions, asking: bool = False) -> None:
        """Refuse a session that is one too many for its tab, or whose tab has ended; others are no matter of tabs.

        Args:
            name: of the session, which may be about to begin; None where there is none.
            sessions: this is called between their rounds, in the same moment as what it allows.
            asking: whether a request follows.

        Raises:
            ApiError: it is refused.
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
