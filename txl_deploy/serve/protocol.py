"""HTTP on one connection: uvicorn's, with a time for headers and for clients that read nothing, and errors as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable
from http import HTTPStatus

import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from txl_deploy.serve.errors import ApiError

UNREAD = 1 << 17
"""Bytes that the system keeps for a client. Were they megabytes, a slow client would seem to read nothing for long."""


def timed_protocol(seconds: float, most: float, connections: int, refused: Callable[[], object]) -> type[H11Protocol]:
    """The class of connections.

    Args:
        seconds: for the headers of a request, and in which a client has to read something of what waits for it.
        most: seconds in which it has to read all that waits.
        connections: at once.
        refused: is called for each connection beyond those, which no request counts.
    """

    class TimedProtocol(H11Protocol):
        """One connection."""

        _waiting: asyncio.TimerHandle | None = None
        _stalled: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """A client has come; beyond the limit it is told so and sent away."""
            super().connection_made(transport)
            with contextlib.suppress(OSError, AttributeError):  # gone again, or no socket
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD)
            if len(self.connections) > connections:
                refused()
                transport.write(_raw(ApiError(503, f"{connections} connections are open, the most; try again later")))
                transport.close()
                return
            self._await_request()

        def data_received(self, data: bytes) -> None:
            """Bytes have come; the time for headers ends with them and not with their first byte."""
            if self.transport.is_closing():
                return
            super().data_received(data)
            self._await_request()

        def on_response_complete(self) -> None:
            """An answer is out; half of the next request may have come already."""
            super().on_response_complete()
            if self.conn.trailing_data[0]:
                self._await_request()

        def connection_lost(self, exc: Exception | None) -> None:
            """The client has gone."""
            super().connection_lost(exc)
            for timer in (self._waiting, self._stalled):
                if timer is not None:
                    timer.cancel()

        def pause_writing(self) -> None:
            """The client does not read as fast as it is answered."""
            super().pause_writing()
            self._watch()

        def resume_writing(self) -> None:
            """It has caught up."""
            super().resume_writing()
            if self._stalled is not None:
                self._stalled.cancel()
                self._stalled = None

        def timeout_keep_alive_handler(self) -> None:
            """Nothing came for a while after an answer; one that is still being read keeps its connection."""
            if self.transport.get_write_buffer_size():
                self._watch()
                self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)
            else:
                super().timeout_keep_alive_handler()

        def _watch(self, left: int | None = None, since: float | None = None) -> None:
            """Look now and then whether the client has read something."""
            if self._stalled is not None and left is None:
                return
            now, size = self.loop.time(), self.transport.get_write_buffer_size()
            began = now if since is None else since
            self._stalled = None
            if left is not None and (size >= left or now - began > most):
                self.transport.abort()
            elif size:
                self._stalled = self.loop.call_later(seconds, self._watch, size, began)

        def send_400_response(self, msg: str) -> None:
            """What came is no HTTP."""
            status = 431 if getattr(sys.exc_info()[1], "error_status_hint", 400) == 431 else 400
            try:
                self.transport.write(_raw(ApiError(status, f"{msg} Expected HTTP/1.1 with short headers.")))
            finally:
                self.transport.close()

        def _await_request(self) -> None:
            """Bound the time in which no request is being answered and bytes of one have come, or none ever came."""
            answering = self.cycle is not None and not self.cycle.response_complete
            if self._waiting is not None and answering:
                self._waiting.cancel()
                self._waiting = None
            elif self._waiting is None and not answering and not self.transport.is_closing():
                self._waiting = self.loop.call_later(seconds, self.transport.abort)

    return TimedProtocol


def _raw(error: ApiError) -> bytes:
    """An answer that goes out before there is a request to answer."""
    body = msgspec.json.encode(error.document())
    head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
