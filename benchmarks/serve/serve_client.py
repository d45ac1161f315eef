"""Send random requests, right and wrong, to a server, as one client of `serve_load.py`, which may kill this process.

    python benchmarks/serve/serve_client.py PORT NUMBER REQUESTS LOG [PROMPT TOKENS]

Each request adds a line of JSON to LOG: the kind of request, the status of its answer, its seconds, and a problem if
there is one. The client counts the lines of LOG as requests that are done, so that the successor of a killed client
sends the remaining ones. Only Python's standard library is needed.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

KINDS = (("plain", 8), ("session", 6), ("stream", 4), ("broken", 3), ("slow", 1), ("gone", 2))
"""The kinds of requests, which are functions of this module, and their relative frequency."""
REFUSALS = {400, 401, 404, 405, 408, 411, 413, 414, 415, 422, 429, 501, 505}
"""The statuses with which a server may refuse a wrong request."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
TOO_MUCH = 3 << 20
"""The bytes of a body that exceeds a server's default limit."""
PATIENCE = 120
"""The seconds for which a client waits for any part of an answer."""


class Server(NamedTuple):
    """The address of the server, and the size of requests.

    Attributes:
        port: the server's port on this machine.
        prompt: the number of characters of the longest prompt.
        tokens: the number of tokens of a whole answer.
    """

    port: int
    prompt: int = 64
    tokens: int = 8


def main() -> None:
    """Send all requests that the log lacks, and write a line for each."""
    number, requests, path = int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    server = Server(int(sys.argv[1]), *map(int, sys.argv[5:]))
    done = len(path.read_bytes().splitlines()) if path.exists() else 0
    with path.open("a", buffering=1) as log:
        for turn in range(done, requests):
            log.write(json.dumps(one(server, number, turn)) + "\n")


def one(server: Server, number: int, turn: int) -> dict[str, Any]:
    """Send one random request, and again after each 429 that says how long to wait; return its line of the log.

    Args:
        server: the server.
        number: the client's number, for the seed.
        turn: the request's number, for the seed.
    """
    draws = random.Random(number * 1_000_003 + turn)
    kind = draws.choices([name for name, _ in KINDS], [share for _, share in KINDS])[0]
    busy, began = 0, time.monotonic()
    while True:
        started = time.monotonic()
        try:
            result = globals()[kind](server, number, draws)
        except (OSError, http.client.HTTPException) as error:
            result = {"status": -1, "problem": f"{type(error).__name__}: {error}"[:200]}
        if result["status"] != 429:
            break
        busy += 1
        if not result.get("retry_after"):
            result["problem"] = "429 without Retry-After"
            break
        time.sleep(draws.uniform(0.05, 1) * float(result["retry_after"]))
    ended = time.monotonic()
    return {"kind": kind, "busy": busy, "seconds": ended - started, "waited": started - began, **result}


def words(draws: random.Random, length: int) -> str:
    """Return a random prompt of `length` characters."""
    return "".join(draws.choices("etaoin shrdlu", k=length))


def body_of(server: Server, draws: random.Random, **more: Any) -> dict[str, Any]:
    """Return the body of a completion request with a random prompt and the fields `more`."""
    prompt = words(draws, draws.randint(1, server.prompt))
    return {"prompt": prompt, "max_tokens": server.tokens, "seed": draws.randrange(1 << 31), **more}


def send(server: Server, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Send a completion request; return the connection, and the answer, whose body is not read yet."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    return connection, connection.getresponse()


def judged(answer: http.client.HTTPResponse, text: bytes) -> dict[str, Any]:
    """Return the fields of a log line for the answer to a right request; a status but 200 and 429 is a problem."""
    results: dict[str, Any] = {"status": answer.status}
    if answer.status == 429:
        results["retry_after"] = answer.getheader("retry-after")
    elif answer.status != 200:
        results["problem"] = f"{answer.status}: {text[:160].decode(errors='replace')}"
    return results


def plain(server: Server, number: int, draws: random.Random, **more: Any) -> dict[str, Any]:
    """Ask for a whole answer without a session, and check that it has all tokens."""
    connection, answer = send(server, body_of(server, draws, **more))
    text = answer.read()
    connection.close()
    result = judged(answer, text)
    if result["status"] == 200 and json.loads(text)["usage"]["completion_tokens"] != server.tokens:
        result["problem"] = "not all tokens"
    return result


def session(server: Server, number: int, draws: random.Random) -> dict[str, Any]:
    """Ask for a whole answer in the session of this client."""
    return plain(server, number, draws, session=f"client {number}")


def stream(server: Server, number: int, draws: random.Random) -> dict[str, Any]:
    """Ask for a streamed answer, and check that it ends with [DONE]."""
    started = time.monotonic()
    connection, answer = send(server, body_of(server, draws, stream=True))
    first, last, end = b"", b"", 0.0
    if answer.status == 200:
        first = answer.readline()
        end = time.monotonic() - started
        for line in answer:
            last = line.strip() or last
    result = judged(answer, first or answer.read())
    if answer.status == 200:
        result["first"] = end
        if last != b"data: [DONE]":
            result["problem"] = f"the stream ended with {last[:100]!r}"
    connection.close()
    return result


def gone(server: Server, number: int, draws: random.Random) -> dict[str, Any]:
    """Ask for a long answer, and disconnect within 0.1 s, before the answer or during it."""
    connection = socket.create_connection(("127.0.0.1", server.port), PATIENCE)
    data = json.dumps(body_of(server, draws, stream=draws.random() < 0.5, max_tokens=64 * server.tokens)).encode()
    connection.sendall(HEAD + f"content-length: {len(data)}\r\n\r\n".encode() + data)
    time.sleep(draws.uniform(0, 0.1))
    connection.close()
    return {"status": 0}


def slow(server: Server, number: int, draws: random.Random) -> dict[str, Any]:
    """Send the request in three parts with pauses, and read the streamed answer slowly, 64 bytes at a time."""
    connection = socket.create_connection(("127.0.0.1", server.port), PATIENCE)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    data = json.dumps(
        body_of(server, draws, stream=True, max_tokens=8 * server.tokens, session=f"slow {number}")
    ).encode()
    for part in (HEAD + f"content-length: {len(data)}\r\n\r\n".encode(), data[:10], data[10:]):
        connection.sendall(part)
        time.sleep(0.05)
    got = b""
    while b"data: [DONE]" not in got and len(got) < 1 << 16 and (piece := connection.recv(64)):
        got += piece
        time.sleep(0.001)
    connection.close()
    status = int(got.split(b" ", 2)[1]) if got.startswith(b"HTTP/1.1 ") else -1
    results: dict[str, Any] = {"status": status}
    if status == 429:
        results["retry_after"] = got.lower().partition(b"retry-after: ")[2].partition(b"\r\n")[0].decode()
    elif status != 200 or b"data: [DONE]" not in got:
        results["problem"] = f"a slow reader got {got[:60]!r} … {got[-60:]!r}"
    return results


def broken(server: Server, number: int, draws: random.Random) -> dict[str, Any]:
    """Send a request that is probably wrong; a refusal needs a known status and the documented JSON object."""
    right = body_of(server, draws)
    bodies: list[Any] = [
        right | {"max_tokens": draws.choice([-1, 1 << 40, "many", 1.5, None, [8], 10**400])},
        right | {"temperature": draws.choice([-1, "hot", 1e999, [], {}])},
        right | {"prompt": draws.choice([5, {}, [[-1]], [256], [[1 << 40]], [None], ["a", 1], [["a"]], True])},
        right | {"session": draws.choice(["", "a/b", "x" * 5000, 7, "\n", ".."])},
        right | {"n": draws.choice([0, -1, 10**9]), "logprobs": draws.choice([-1, 10**6])},
        right | {"no such field": 1},
        [[]] * 3,
        json.loads("[" * 200 + "]" * 200),
    ]
    # some of these bodies are valid: max_tokens may be null
    data = json.dumps(draws.choice(bodies)).encode()
    turn = draws.randrange(6)
    if turn == 0:
        data = data[: draws.randrange(len(data))]
    elif turn == 1:
        data = draws.randbytes(draws.randrange(1, 400))
    elif turn == 2:
        at = draws.randrange(len(data))
        data = data[:at] + draws.randbytes(1) + data[at + 1 :]
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
    )
    length = len(data)
    if turn == 3:
        head = draws.choice(
            [
                b"BREW /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n",
                b"POST /v1/nothing HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n",
                b"\x16\x03\x01 " + draws.randbytes(40) + b"\r\n",
                b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\nx: "
                + b"y" * 70000
                + b"\r\n",
                b"POST /v1/completions HTTP/9.9\r\nhost: 127.0.0.1\r\nconnection: close\r\n",
            ]
        )
    elif turn == 4 and draws.random() < 0.2:
        data, length = b'"' + b"x" * TOO_MUCH, TOO_MUCH + 1
    connection = socket.create_connection(("127.0.0.1", server.port), PATIENCE)
    got = b""
    try:
        connection.sendall(head + f"content-length: {length}\r\n\r\n".encode() + data)
        while piece := connection.recv(65536):
            got += piece
    except ConnectionError:
        pass  # the server refused the request before it had read all of it
    connection.close()
    if not got:
        return {"status": 0}
    status = int(got.split(b" ", 2)[1])
    results: dict[str, Any] = {"status": status}
    text = got.partition(b"\r\n\r\n")[2]
    if status == 429:
        results["retry_after"] = got.lower().partition(b"retry-after: ")[2].partition(b"\r\n")[0].decode()
    elif status == 200:
        results["accepted"] = data[:200].decode(errors="replace")
    elif status not in REFUSALS or (turn != 3 and not text.startswith(b'{"error":{"message":')):
        results["problem"] = f"{status} {text[:120]!r} for {data[:120]!r}"
    return results


if __name__ == "__main__":
    main()
