"""What connections take of uvicorn beyond its documentation: clients that are waited for, sent away, and told why."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn

from txl_deploy.serve.protocol import timed_protocol

MANY = 3
"""Connections that the server below takes."""
TOLD: list[int] = []
"""One entry for each connection that it sent away."""


async def application(scope: dict[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def config(**more: Any) -> uvicorn.Config:
    http = timed_protocol(0.2, 1.0, MANY, lambda: TOLD.append(1))
    return uvicorn.Config(application, http=http, ws="none", lifespan="off", log_config=None, **more)


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    """A server with these connections on a real socket, in a thread of its own."""
    server = uvicorn.Server(config(h11_max_incomplete_event_size=4096))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
        thread.start()
        yield listening.getsockname()
        server.should_exit = True
        thread.join()


def heard(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    connection.settimeout(60)
    return b"".join(iter(lambda: connection.recv(4096), b""))


def test_nothing_at_all_half_a_header_and_half_a_second_request_are_waited_for_so_long(address: Any) -> None:
    whole = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
    for sent, answers in ((b"", 0), (b"GET / HTTP/1.1\r\nho", 0), (whole + b"GET / HT", 1)):
        with socket.create_connection(address) as connection:
            connection.sendall(sent)
            try:
                told = heard(connection)
            except ConnectionResetError:
                told = b""
            assert told.count(b"HTTP/1.1 200") == answers


def test_a_connection_beyond_the_most_is_told_so_and_the_others_are_answered(address: Any) -> None:
    TOLD.clear()
    connections = [socket.create_connection(address) for _ in range(MANY)]
    for connection in connections:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"
    with socket.create_connection(address) as refused:
        head, _, body = heard(refused).partition(b"\r\n\r\n")
    assert head.partition(b"\r\n")[0] == b"HTTP/1.1 503 Service Unavailable"
    assert json.loads(body)["error"]["message"].startswith(f"{MANY} connections are open")
    assert len(TOLD) == 1, "the server's metrics count it"
    for connection in connections:
        connection.close()


@pytest.mark.parametrize(
    ("sent", "status"), [(b"no HTTP\r\n\r\n", b"400"), (b"GET / HTTP/1.1\r\nx: " + b"a" * 9000, b"431")]
)
def test_what_is_no_http_is_answered_as_json(address: Any, sent: bytes, status: bytes) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(sent)
        head, _, body = heard(connection).partition(b"\r\n\r\n")
    assert head[9:12] == status
    assert "Expected HTTP/1.1 with short headers" in json.loads(body)["error"]["message"]
