"""Servers for tests: one in this process, without sockets, and one as users start it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import txl_runtime
from txl_runtime.sessions import AsyncSessions, Sessions
from txl_runtime.sessions.state import largest_state
from txl_runtime.streaming.texts import TokenTexts

from txl_deploy.retrieval.store import open_store
from txl_deploy.serve.app import make_app
from txl_deploy.serve.health import Health
from txl_deploy.serve.keeping import Keeping
from txl_deploy.serve.logs import Log
from txl_deploy.serve.metrics import Metrics
from txl_deploy.serve.service import Service
from txl_deploy.serve.settings import ServerSettings

HOST = "http://localhost"


class Served:
    """An application in an event loop of its own thread; `get`, `post` … are as a client's, `json` in and out.

    Attributes:
        loop: it runs in.
        service: what it serves with.
        client: asks it, in its own loop.
    """

    def __init__(self, bundle: Path, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.settings = ServerSettings(bundle=bundle, **options)
        self.model = txl_runtime.load(bundle, "cpu", threads=1)
        self.sessions = Sessions(self.model, self.settings.rows, self.settings.limits)
        self.service = self.wait(self._open())

    async def _open(self) -> Service:
        self._front = await AsyncSessions(self.sessions).__aenter__()
        log = Log(self.settings.json_logs)
        table = self.model.manifest.states_of(self.model.update)
        service = Service(
            self.settings,
            self.model,
            self._front,
            Health(self.model),
            Metrics(self.model),
            Keeping(log),
            TokenTexts(self.model.vocabulary),
            int(time.time()),
            largest_state(self.model.manifest, table),
            open_store(self.model, self.settings.mixture),
        )
        app = make_app(service, log)
        self.app = app
        self.client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url=HOST, timeout=60)
        return service

    def wait(self, coroutine: Any) -> Any:
        """The result of what runs in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(120)

    def request(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """One request and its answer."""
        return self.wait(self.client.request(method, path, **options))

    def get(self, path: str, **options: Any) -> httpx2.Response:
        """GET."""
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        """POST of a JSON document."""
        return self.request("POST", path, json=body, **options)

    def complete(self, **body: Any) -> dict[str, Any]:
        """A completion that succeeds."""
        answer = self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, **body: Any) -> list[dict[str, Any]]:
        """The events of a streamed completion, without the last word."""
        answer = self.post("/v1/completions", {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        return events_of(answer.text)

    def refused(
        self, status: int, method: str = "POST", path: str = "/v1/completions", **options: Any
    ) -> dict[str, Any]:
        """The error object of a request that is refused with this status."""
        answer = self.request(method, path, **options)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert list(error) == ["message", "type", "param", "code"]
        return error

    def close(self) -> None:
        """End it."""
        self.wait(self.client.aclose())
        self.wait(self._front.__aexit__(None, None, None))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(30)
        self.loop.close()


def events_of(text: str) -> list[dict[str, Any]]:
    """The JSON objects of server-sent events, which have to end with [DONE]."""
    data = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert data.pop() == "[DONE]"
    return [json.loads(line) for line in data]


class Server:
    """`txl-deploy serve` in a process of its own.

    Attributes:
        url: where it listens.
        process: of it.
        log: its standard error, once it has ended.
    """

    def __init__(self, bundle: Path, *options: object, **environment: str) -> None:
        command = [sys.executable, "-m", "txl_deploy", "serve", bundle, "--port", 0, "--json-logs", *options]
        self.process = subprocess.Popen(
            [*map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.log = ""
        if not line:
            raise AssertionError(self.end())
        self.ready = json.loads(line)
        self.url = self.ready["url"]

    def end(self, number: int | None = signal.SIGTERM, seconds: float = 60) -> int:
        """Tell it to stop and wait; its exit code."""
        if number is not None and self.process.poll() is None:
            self.process.send_signal(number)
        try:
            _, self.log = self.process.communicate(timeout=seconds)
        finally:
            self.process.kill()
        return self.process.returncode


@contextlib.contextmanager
def serving(bundle: Path, *options: object, **environment: str) -> Iterator[Server]:
    """A server that is killed at the end, if it still runs."""
    server = Server(bundle, *options, **environment)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()
