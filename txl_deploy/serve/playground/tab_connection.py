"""Keep a tab's connection open by an endless answer, which sends the tab's name, and a beat every 5 seconds."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from txl_deploy.serve.disconnects import unless_gone
from txl_deploy.serve.errors import ApiError
from txl_deploy.serve.playground.tabs import REQUESTS, SESSIONS, Tabs
from txl_deploy.serve.service import service_of

BEAT = 5.0
"""Seconds between two beats. A client that has vanished acknowledges no beat, so the system ends its connection."""


async def tab(request: Request) -> Response:
    """GET /playground/tab: server-sent events. The first event has the fields `tab`, `sessions` and `requests`.

    `tab` is a new name, the other fields are limits; all later events are beats. Sessions whose names begin with the
    tab's name and a dash belong to the page. When the connection ends, for any reason, these sessions' requests are
    cancelled and the sessions are closed.

    Raises:
        ApiError: too many tabs are open.
    """
    if request.method == "HEAD":
        raise ApiError(405, "a tab is a connection, expected GET; use that", code="method")
    return _Staying(service_of(request).tabs)


class _Staying(Response):
    """An answer that lasts until its client disconnects or the server stops."""

    def __init__(self, tabs: Tabs) -> None:
        self._tabs = tabs
        super().__init__(None, 200, {"cache-control": "no-store", "x-accel-buffering": "no"}, "text/event-stream")
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = self._tabs.open()
        try:
            await unless_gone(receive, self._stream(name, send))
        finally:
            await self._tabs.end(name)

    async def _stream(self, name: str, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        message: dict[str, object] = {"tab": name, "sessions": SESSIONS, "requests": REQUESTS}
        while not self._tabs.closing.is_set():
            event = b"data: " + msgspec.json.encode(message) + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
            message = {}
            try:
                await asyncio.wait_for(self._tabs.closing.wait(), BEAT)
            except asyncio.TimeoutError:
                continue
        await send({"type": "http.response.body", "body": b"", "more_body": False})
