"""What connections take of uvicorn beyond its documentation, held against the release that is installed.

`serve/protocol.py` subclasses uvicorn's class of connections, whose methods and attributes are nobody's promise. A
release that changes one of them fails here first, and the failure says which. What clients meet is in `test_running`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import h11
import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from txl_deploy.serve.protocol import timed_protocol

OVERRIDDEN = {
    "connection_made": ["transport"],
    "data_received": ["data"],
    "on_response_complete": [],
    "connection_lost": ["exc"],
    "pause_writing": [],
    "resume_writing": [],
    "timeout_keep_alive_handler": [],
    "send_400_response": ["msg"],
}
"""The methods that are extended or replaced, and their parameters."""
READ = ("connections", "transport", "conn", "cycle", "loop", "timeout_keep_alive_task")
"""The attributes that are read."""
MANY = 3
"""Connections that the server below takes."""
TOLD: list[int] = []
"""One entry for each connection that it sent away."""


def hold(what: str, found: object, expected: object) -> None:
    """Fail with what has changed, and where that matters."""
    assert found == expected, (
        f"uvicorn {uvicorn.__version__}: {what} is {found}, expected {expected}; hold txl_deploy/serve/protocol.py "
        "against its h11_impl.py, then change both or the range in pyproject.toml"
    )


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


def test_what_is_overridden_is_there_and_takes_the_same() -> None:
    ours = vars(timed_protocol(1, 1, 1, lambda: None))
    hold("what it has of our methods", {n for n in ours if hasattr(H11Protocol, n) and n[0] != "_"}, set(OVERRIDDEN))
    for name, expected in OVERRIDDEN.items():
        hold(f"H11Protocol.{name}", [*inspect.signature(getattr(H11Protocol, name)).parameters], ["self", *expected])
    for name in ("_waiting", "_stalled", "_watch", "_await_request"):
        hold(f"a name of its own that we use, {name},", hasattr(H11Protocol, name), False)


def test_a_parameter_more_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(H11Protocol, "pause_writing", lambda self, why: None)
    with pytest.raises(AssertionError, match=r"H11Protocol.pause_writing is \['self', 'why'\], expected \['self'\]"):
        test_what_is_overridden_is_there_and_takes_the_same()


def test_what_is_read_is_there() -> None:
    loop = asyncio.new_event_loop()
    try:
        connection = H11Protocol(config=config(), server_state=ServerState(), app_state={}, _loop=loop)
        for name in READ:
            hold(f"whether a connection has {name}", hasattr(connection, name), True)
        hold("the kind of conn", type(connection.conn), h11.Connection)
        hold("the connections", connection.connections, set())
        hold("the cycle of a connection without requests", connection.cycle, None)
        hold("conn.trailing_data", connection.conn.trailing_data, (b"", False))
    finally:
        loop.close()
    hold("what a cycle tells of its end", "self.response_complete" in inspect.getsource(RequestResponseCycle), True)


def test_nothing_at_all_half_a_header_and_half_a_second_request_are_waited_for_so_long(address: Any) -> None:
    whole = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
    for sent, answers in ((b"", 0), (b"GET / HTTP/1.1\r\nho", 0), (whole + b"GET / HT", 1)):
        with socket.create_connection(address) as connection:
            connection.sendall(sent)
            try:
                told = heard(connection)
            except ConnectionResetError:
                told = b""
            hold(f"the number of answers to {sent!r}", told.count(b"HTTP/1.1 200"), answers)


def test_a_connection_beyond_the_most_is_told_so_and_the_others_are_answered(address: Any) -> None:
    TOLD.clear()
    connections = [socket.create_connection(address) for _ in range(MANY)]
    for connection in connections:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        hold("the beginning of an answer", connection.recv(12), b"HTTP/1.1 200")
    with socket.create_connection(address) as refused:
        head, _, body = heard(refused).partition(b"\r\n\r\n")
    hold("the answer beyond the most", head.partition(b"\r\n")[0], b"HTTP/1.1 503 Service Unavailable")
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
    hold(f"the status of {sent[:20]!r}", head[9:12], status)
    assert "Expected HTTP/1.1 with short headers" in json.loads(body)["error"]["message"]
