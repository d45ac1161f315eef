"""Sessions, any number of which share the rows of one stream; a session's memory outlives its requests.

`Sessions` is the core, for one thread: `submit` accepts a `Request` and returns a `Ticket`, `round` runs one segment of
some sessions, and `Ticket.events` returns the results. `AsyncSessions` runs the core in its own thread, for asyncio.
"""

from __future__ import annotations

from txl_runtime.sessions.asynchronous import AsyncSessions, Handle
from txl_runtime.sessions.checkpoint import Checkpoint
from txl_runtime.sessions.core import Sessions
from txl_runtime.sessions.jobs import Ticket
from txl_runtime.sessions.requests import (
    Busy,
    ClosedError,
    Event,
    Finished,
    Limits,
    Outputs,
    Prompt,
    Request,
    Sampling,
    SessionInfo,
    Token,
    joined,
)
from txl_runtime.sessions.state import SessionState

__all__ = [
    "AsyncSessions",
    "Busy",
    "Checkpoint",
    "ClosedError",
    "Event",
    "Finished",
    "Handle",
    "Limits",
    "Outputs",
    "Prompt",
    "Request",
    "Sampling",
    "SessionInfo",
    "SessionState",
    "Sessions",
    "Ticket",
    "Token",
    "joined",
]
