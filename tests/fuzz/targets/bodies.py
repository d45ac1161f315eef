"""Requests of HTTP, straight into the server's application: hostile paths, headers and bodies, in pieces, cut short."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from safetensors.numpy import save
from serving import Served
from txl_runtime.errors import TxlError

from fuzz.choices import Choices
from fuzz.edits import edited
from fuzz.targets.places import BASES
from txl_deploy.serve import orders

STATUSES = {200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 429, 503}
"""The statuses that a client may get; 500 says that the model itself failed, or that we did."""
SESSIONS = 8
orders.MAX_TOKENS, orders.PROMPT_TOKENS = 4, 48  # so that one input takes a moment
METHODS = ("POST", "GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "\x7f")
JSON, STATE, SAFETENSORS = "application/json", "application/octet-stream", "application/vnd.safetensors"
PATHS = (
    *("/v1/completions", "/v1/sessions/a/state", "/v1/sessions/a/run", "/tokenize", "/detokenize", "/v1/sessions/a"),
    *("/v1/sessions", "/v1/models", "/v1/models/step", "/tokenizer_info", "/health", "/metrics", "/", "/v1/sessions/"),
    *("/v1/sessions/a/copy", "/v1/sessions/a/cancel", "/playground", "/playground/page.js", "/playground/tab"),
)
TEXTS: tuple[Any, ...] = ("", "a b", "\n", ["a", "b"], [1, 2, 3], [[1], [2, 3]], [], [[]], None)
DOCUMENTS: tuple[dict[str, Any], ...] = (
    {
        "prompt": "a",
        "max_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "seed": 1,
        "session": "a",
        "session_seen": 0,
    },
    {"prompt": [1, 2], "n": 2, "max_tokens": 1, "logprobs": 2, "echo": True, "stop": ["a ", "\n"]},
    {"prompt": "a", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}, "logprobs": 0},
    {"prompt": [[1], [2, 3]], "max_tokens": 0, "echo": True, "logprobs": 1, "stop_token_ids": [2], "user": {"a": 1}},
    {
        "prompt": "a",
        "best_of": 1,
        "suffix": "",
        "presence_penalty": 0,
        "logit_bias": {"5": -100},
        "metadata": {},
        "min_p": 0,
    },
    {"prompt": "a b", "add_special_tokens": False, "return_token_strs": True, "model": "step"},
    {"tokens": [1, 2, 3]},
    {"inputs": {"features": [[[0.5, 1.0, -1.0, 0.0]]]}},
    {"inputs": {"tokens": [[1, 2]]}},
    {"to": "b"},
    {"prompt": "a", "max_tokens": 2, "session": "a", "memory_length": 2},
)


def one_input(data: bytes) -> None:
    """Send one request; the answer is whole, of a known status, and the server is as it was before.

    Raises:
        TxlError: what the answer says, where it is a refusal.
    """
    choices = Choices(data)
    server = _server(choices.pick(("transformer_xl", "step")))
    method, path = choices.pick(METHODS), choices.pick(PATHS) if choices.number(7) else f"/{choices.text()}"
    kind = choices.pick((JSON, STATE, SAFETENSORS, f"{JSON}; charset=utf-8", "", "text/plain"))
    headers = [(b"host", b"localhost"), (b"content-type", kind.encode())]
    for _ in range(choices.number(3)):
        name = choices.pick((b"host", b"content-length", b"content-type", b"authorization", b"origin", b"expect", b"x"))
        headers.insert(0, (name, choices.some(40)))
    leaves, pieces = choices.number(7) == 7, choices.number(3)
    leaves |= path == "/playground/tab"  # which lasts as long as its client stays
    body = _body(choices)
    status, answer = server.wait(_sent(server, method, path, headers, body, pieces, leaves))
    assert server.service.running == 0
    assert len(server.wait(server.service.front.call(lambda sessions: list(sessions.names())))) <= SESSIONS
    if status is None:
        assert leaves
        return
    assert status in STATUSES, (status, answer[:300])
    if status >= 400 and method != "HEAD":
        found = json.loads(answer)
        if "error" in found:
            assert list(found["error"]) == ["message", "type", "param", "code"]
            raise TxlError(found["error"]["message"])
        raise TxlError(found["status"])


def seeds() -> Iterator[bytes]:
    """Every document to its path, whole and in pieces; states and arrays."""
    for bundle in range(2):
        for number in range(len(DOCUMENTS)):
            for path in range(len(PATHS)):
                if path in (0, 2, 3, 4, 14):
                    yield bytes([bundle, 0, 1, path, 0, 0, 0, 0, 0, number, 0])
        for path in range(len(PATHS)):
            for method in range(4):
                yield bytes([bundle, method, 1, path, 0, 0, 0, 2, 0, 0, 0, 1, method])
        yield bytes([bundle, 2, 1, 1, 1, 0, 0, 0, 2]) + save({"fill": np.zeros(1, np.int32)}, {"format": "a"})
        yield bytes([bundle, 0, 1, 2, 2, 0, 0, 0, 2]) + save({"features": np.zeros((1, 2, 4), np.float32)})
        yield bytes([bundle, 2, 1, 1, 1, 0, 0, 0, 3])
        yield bytes([bundle, 0, 0, 5]) + b"/v1/x"


def _body(choices: Choices) -> bytes:
    match choices.number(3):
        case 0:  # a document with changes
            document = edited(choices.pick(DOCUMENTS), choices, 6)
            return json.dumps(document).encode(errors="replace")
        case 1:
            document = dict(choices.pick(DOCUMENTS))
            document["prompt"] = choices.pick(TEXTS)
            return json.dumps(document).encode()
        case 2:
            return choices.rest()
        case _:  # the state of a session, with some bytes changed
            state = bytearray(_state())
            for _ in range(choices.number(7)):
                place = choices.number(min(len(state), 1 << 12) - 1)
                state[place] = choices.number(255)
            return bytes(state[: len(state) - choices.number(3) * 7])


async def _sent(
    server: Served,
    method: str,
    path: str,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
    pieces: int,
    leaves: bool,
) -> tuple[int | None, bytes]:
    """The status and the body of the answer; None where the client left before there was one."""
    size = len(body) // (pieces + 1) + 1
    parts = [body[first : first + size] for first in range(0, len(body), size)] or [b""]
    statuses: list[int] = []
    answer = bytearray()
    ended = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if parts:
            part = parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(parts)}
        if not leaves:
            await ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            assert not statuses
            statuses.append(message["status"])
        else:
            assert statuses
            answer.extend(message.get("body", b""))
            if not message.get("more_body"):
                ended.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(errors="replace"),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    await asyncio.wait_for(server.app(scope, receive, send), 60)
    if not ended.is_set():
        return None, b""
    return statuses[0], bytes(answer)


@cache
def _server(name: str) -> Served:
    return Served(BASES / name, sessions=SESSIONS)


@cache
def _state() -> bytes:
    server = _server("transformer_xl")
    server.complete(prompt=[1, 2], session="begun", max_tokens=1)
    state = server.get("/v1/sessions/begun/state").content
    server.request("DELETE", "/v1/sessions/begun")
    return state
