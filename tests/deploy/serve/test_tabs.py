"""Tabs of the playground: their sessions live as long as their connection, and each has limits of its own."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from serving import Served
from support import until

from txl_deploy.serve.playground.tabs import REQUESTS, SESSIONS, of_tab


class Tab:
    """A client of GET /playground/tab inside of a server's event loop.

    Attributes:
        status: of the answer.
        name: of the tab.
        events: everything that came.
    """

    def __init__(self, server: Served, **headers: str) -> None:
        self._server, self.status, self.events = server, 0, list[Any]()
        self.name = server.wait(self._open(headers))

    async def _open(self, headers: dict[str, str]) -> str:
        self._gone, self._came, body = asyncio.Event(), asyncio.Event(), bytearray()

        async def receive() -> dict[str, Any]:
            await self._gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            self.status = message.get("status", self.status)
            body.extend(message.get("body", b""))
            while b"\n\n" in body:
                event, _, rest = bytes(body).partition(b"\n\n")
                body[:] = rest
                self.events.append(json.loads(event.removeprefix(b"data: ")))
            if self.events or not message.get("more_body", True):
                self._came.set()

        given = [(name.encode(), value.encode()) for name, value in {"host": "localhost", **headers}.items()]
        scope = {"type": "http", "method": "GET", "path": "/playground/tab", "query_string": b"", "headers": given}
        self._running = asyncio.create_task(self._server.app(scope, receive, send))
        waiting = asyncio.create_task(self._came.wait())
        await asyncio.wait((self._running, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return str(self.events[0]["tab"]) if self.status == 200 else ""

    def leave(self) -> None:
        """The client goes, and the server has noticed it."""
        self._server.loop.call_soon_threadsafe(self._gone.set)
        self.ended()

    def ended(self) -> None:
        """Wait until the server has ended it."""

        async def wait() -> None:
            await self._running

        self._server.wait(wait())


def names(server: Served) -> list[str]:
    return [each["name"] for each in server.get("/v1/sessions").json()["data"]]


def test_a_tab_is_told_its_name_and_what_it_may_take(serve):
    server = serve()
    tab = Tab(server)
    assert tab.events == [{"tab": tab.name, "sessions": SESSIONS, "requests": REQUESTS}]
    assert of_tab(f"{tab.name}-text") == tab.name
    assert len(server.service.tabs) == 1
    other = Tab(server)
    assert other.name != tab.name
    other.leave()
    tab.leave()
    assert len(server.service.tabs) == 0
    assert server.service.running == 0


def test_its_end_closes_its_sessions_and_no_others(serve):
    server = serve()
    tab, other = Tab(server), Tab(server)
    for name in (f"{tab.name}-a", f"{other.name}-a", "ada", tab.name, f"x{tab.name}-a"):
        server.complete(prompt="abc", session=name, max_tokens=1)
    server.post(f"/v1/sessions/{tab.name}-a/copy", {"to": f"{tab.name}-b"})
    assert len(names(server)) == 6
    tab.leave()
    assert sorted(names(server)) == sorted([f"{other.name}-a", "ada", tab.name, f"x{tab.name}-a"])
    other.leave()


def test_its_end_cancels_what_runs(serve):
    server = serve()
    tab = Tab(server)
    body = {"prompt": "abc", "session": f"{tab.name}-a", "max_tokens": 16_000}
    asked = asyncio.run_coroutine_threadsafe(server.client.post("/v1/completions", json=body), server.loop)
    until(lambda: names(server))
    tab.leave()
    answer = asked.result(60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "closed")
    assert names(server) == []
    assert server.wait(server.service.front.call(lambda sessions: sessions.unfinished)) == 0


def test_what_comes_under_the_name_of_a_tab_that_has_ended_is_refused(serve):
    server = serve()
    server.complete(prompt="abc", session="ada", max_tokens=1)
    state = server.get("/v1/sessions/ada/state").content
    tab = Tab(server)
    tab.leave()
    name = f"{tab.name}-a"
    headers = {"content-type": "application/octet-stream"}
    refused = [
        server.refused(409, json={"prompt": "abc", "session": name}),
        server.refused(409, path="/v1/sessions/ada/copy", json={"to": name}),
        server.refused(409, "PUT", f"/v1/sessions/{name}/state", content=state, headers=headers),
        server.refused(409, path=f"/v1/sessions/{name}/run", json={"inputs": {"tokens": [[1]]}}),
    ]
    assert {error["code"] for error in refused} == {"tab"}
    assert names(server) == ["ada"]


def test_a_tab_has_so_many_sessions(serve):
    server = serve()
    tab = Tab(server)
    server.complete(prompt="abc", session=f"{tab.name}-0", max_tokens=1)
    for number in range(1, SESSIONS):
        assert server.post(f"/v1/sessions/{tab.name}-0/copy", {"to": f"{tab.name}-{number}"}).status_code == 200
    one_more = {"to": f"{tab.name}-{SESSIONS}"}
    error = server.refused(429, path=f"/v1/sessions/{tab.name}-0/copy", json=one_more)
    assert error["message"] == "the tab has 32 sessions, the most; drop a state that you kept, then try again"
    server.refused(429, json={"prompt": "abc", "session": one_more["to"]})
    assert server.post(f"/v1/sessions/{tab.name}-0/copy", {"to": f"{tab.name}-1"}).status_code == 200, "it is there"
    assert server.request("DELETE", f"/v1/sessions/{tab.name}-5").status_code == 200
    assert server.post(f"/v1/sessions/{tab.name}-0/copy", one_more).status_code == 200
    tab.leave()


@pytest.mark.parametrize("sessions", [REQUESTS, 1])
def test_a_tab_has_so_many_requests_at_once(serve, sessions: int):
    """Requests that wait for a different one of their session count as well."""
    server = serve()
    tab = Tab(server)

    async def ask() -> list[Any]:
        body = {"prompt": "abc", "max_tokens": 16_000}
        sent = [
            asyncio.create_task(
                server.client.post("/v1/completions", json={**body, "session": f"{tab.name}-{number % sessions}"})
            )
            for number in range(REQUESTS)
        ]
        while await server.service.front.call(lambda kept: kept.unfinished) < REQUESTS:
            await asyncio.sleep(0.01)
        refused = await server.client.post("/v1/completions", json={**body, "session": f"{tab.name}-0"})
        beside = await server.client.post("/v1/completions", json={"prompt": "abc", "session": "ada", "max_tokens": 1})
        for number in range(sessions):
            await server.client.post(f"/v1/sessions/{tab.name}-{number}/cancel")
        await asyncio.gather(*sent)
        return [refused, beside]

    refused, beside = server.wait(ask())
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tab")
    assert beside.status_code == 200
    server.complete(prompt="abc", session=f"{tab.name}-0", max_tokens=1)
    tab.leave()


@pytest.mark.parametrize(("most", "said"), [(1, "one tab of the playground is"), (2, "2 tabs of the playground are")])
def test_a_tab_beyond_the_limit_is_told_so(serve, most, said):
    server = serve(tabs=most)
    tabs = [Tab(server) for _ in range(most)]
    error = server.refused(429, "GET", "/playground/tab")
    assert error["message"].startswith(f"{said} open already, the most here; close another tab first")
    assert error["code"] == "tabs"
    tabs[0].leave()
    again = Tab(server)
    assert again.status == 200
    for tab in (again, *tabs[1:]):
        tab.leave()


def test_tabs_end_when_the_server_stops(serve):
    server = serve()
    tab = Tab(server)
    server.complete(prompt="abc", session=f"{tab.name}-a", max_tokens=1)

    async def stop() -> None:
        server.service.tabs.close()

    server.wait(stop())
    tab.ended()
    assert names(server) == []


def test_a_tab_is_asked_for_with_get_alone(serve):
    server = serve()
    assert server.request("HEAD", "/playground/tab").status_code == 405
    assert server.refused(405, path="/playground/tab")["code"] == "method"
    assert len(server.service.tabs) == 0


def test_beats_come_as_long_as_the_tab_is_open(serve, monkeypatch):
    monkeypatch.setattr("txl_deploy.serve.playground.tab_connection.BEAT", 0.01)
    tab = Tab(serve())
    until(lambda: len(tab.events) >= 4)
    assert tab.events[1:4] == [{}, {}, {}]
    tab.leave()
